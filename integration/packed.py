"""Databases that are committed packed, and unpacked beside where they are."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

PROFILE = "profile.db"


def profile_of(folder: Path) -> Path:
    """``profile.db`` of a folder; made from ``profile.db.xz`` where that alone is there."""
    return unpacked(folder / PROFILE)


def unpacked(path: Path) -> Path:
    """`path`, made from ``PATH.xz`` where that alone is there."""
    packed = path.with_name(f"{path.name}.xz")
    if not path.exists() and packed.exists():
        # Several test processes may want it at once.
        written = path.with_name(f".{path.name}.{os.getpid()}")
        written.write_bytes(lzma.decompress(packed.read_bytes()))
        written.replace(path)
    return path
