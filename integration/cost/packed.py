"""Databases that are committed packed."""

from __future__ import annotations

import lzma
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PACKED = ".xz"


@contextmanager
def unpacked(name: str) -> Iterator[str]:
    """The database itself, or what is packed in it while the block runs."""
    if not name.endswith(_PACKED):
        yield name
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "packed.db"
        path.write_bytes(lzma.decompress(Path(name).read_bytes()))
        yield str(path)
