"""The profile of a folder of results, which is committed packed."""

from __future__ import annotations

import lzma
import os
from pathlib import Path

PROFILE = "profile.db"


def profile_of(folder: Path) -> Path:
    """``profile.db`` of a folder; made from ``profile.db.xz`` where that alone is there."""
    path = folder / PROFILE
    packed = folder / f"{PROFILE}.xz"
    if not path.exists() and packed.exists():
        # Several test processes may want it at once.
        written = path.with_name(f".{PROFILE}.{os.getpid()}")
        written.write_bytes(lzma.decompress(packed.read_bytes()))
        written.replace(path)
    return path
