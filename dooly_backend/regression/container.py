"""The file of a bundle: one that `joblib.load` opens, and that is read here without unpickling.

Unpickling a stranger's file can run anything. So a bundle's file has one fixed
form: the pickle (protocol 4) of a dict of the format's name, its version, the
SHA-256 of the content, and the content, compressed JSON as bytes. It names no
class and calls nothing. Reading compares the fixed bytes, the length and the
checksum; a file of any other form is refused before anything of it is used.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from dooly_backend.errors import InputError

FORMAT = "dooly-bundle"
VERSION = 3
_LARGEST = 1 << 30  # bytes of JSON: what a small file may not swell beyond
_DIGEST = 64  # hex digits


class BundleError(InputError):
    """The file given as a bundle cannot be used."""


def write(path: Path, content: dict[str, Any]) -> None:
    """Write `content`, which JSON can hold. A reader sees the old file or the new one."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    packed = zlib.compress(text.encode(), level=6)
    whole = _head(hashlib.sha256(packed).hexdigest(), len(packed)) + packed + _TAIL
    partial = path.with_name(path.name + ".part")
    try:
        partial.write_bytes(whole)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """The content of a file. Raises BundleError, in one line, for any but a whole bundle."""
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        raise BundleError(
            f"there is no bundle {path}: make one with `dooly fit -o {path}`"
        ) from None
    except OSError as error:
        raise BundleError(f"bundle {path} cannot be read: {error.strerror}") from error
    packed = _packed(whole, path)
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(packed, _LARGEST)
        if not unpacker.eof:
            raise BundleError(f"bundle {path} is larger than {_LARGEST >> 20} MiB: it is no bundle")
        content = json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise BundleError(f"bundle {path} holds no JSON ({error}): fit again") from error
    if not isinstance(content, dict):
        raise BundleError(f"bundle {path} holds no object: fit again")
    return content


def _packed(whole: bytes, path: Path) -> bytes:
    """The compressed content of a file whose form and checksum are right."""
    start = len(_head("0" * _DIGEST, 0))
    packed = whole[start : len(whole) - len(_TAIL)]
    if not whole.startswith(_START):
        raise BundleError(
            f"{path} is no bundle of this version (nothing of it was run): "
            "make one with `dooly fit`"
        )
    digest = hashlib.sha256(packed).hexdigest()
    if whole != _head(digest, len(packed)) + packed + _TAIL:
        raise BundleError(
            f"bundle {path} is damaged: bytes are missing or changed; get it again, or fit again"
        )
    return packed


# -- the pickle, by hand: https://docs.python.org/3/library/pickletools.html ----


def _text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()  # SHORT_BINUNICODE


# PROTO 4, EMPTY_DICT, MARK, then keys and values; BININT1 for the version.
_START = (
    b"\x80\x04}("
    + (_text("format") + _text(FORMAT))
    + (_text("version") + b"K" + bytes([VERSION]) + _text("sha256"))
)
_TAIL = b"u."  # SETITEMS, STOP


def _head(digest: str, length: int) -> bytes:
    """Up to the content: BINBYTES8 and its length."""
    return _START + _text(digest) + _text("content") + b"\x8e" + struct.pack("<Q", length)
