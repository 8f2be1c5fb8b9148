"""Databases that ship with the package: compressed there, unpacked once for each user."""

from __future__ import annotations

import atexit
import hashlib
import lzma
import os
import shutil
import tempfile
from importlib import resources
from pathlib import Path

from dooly_backend.errors import DatabaseError, InputError

_ENDING = ".db.xz"


def shipped_path(name: str) -> Path:
    """A file with the contents of a database that is shipped with the package.

    It lies in the user's cache (``XDG_CACHE_HOME``, else ``~/.cache``), under a name that
    tells the contents, so that another version of the package has another file. Where the
    cache cannot be written it is a temporary file of this process. Raises InputError for
    a name that is not shipped, DatabaseError where neither can be written.
    """
    folder = Path(str(resources.files("dooly_backend.database"))) / "builtin"
    names = sorted(file.name.removesuffix(_ENDING) for file in folder.glob(f"*{_ENDING}"))
    if name not in names:
        shipped = ", ".join(names) or "none is shipped"
        raise InputError(f"no built-in database {name!r} ({shipped}): give a file")
    packed = (folder / f"{name}{_ENDING}").read_bytes()
    cached = _cache() / f"{name}-{hashlib.sha256(packed).hexdigest()[:16]}.db"
    if cached.is_file():
        return cached
    contents = lzma.decompress(packed)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        _write(cached, contents)
    except OSError:  # a home that is read-only or full
        try:
            private = Path(tempfile.mkdtemp(prefix="dooly-"))
            atexit.register(shutil.rmtree, private, ignore_errors=True)
            cached = private / f"{name}.db"
            _write(cached, contents)
        except OSError as error:
            raise DatabaseError(
                f"the built-in database {name!r} cannot be unpacked into {_cache()} or "
                f"{tempfile.gettempdir()} ({error}): set XDG_CACHE_HOME to a folder with "
                f"{(len(contents) >> 20) + 1} MiB of space"
            ) from error
    return cached


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path("~/.cache").expanduser()) / "dooly"


def _write(path: Path, contents: bytes) -> None:
    """All of it or nothing, also beside other processes that do the same."""
    handle, temporary = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
