"""One process at a time measures on a device, whatever database it writes to.

The lock is the operating system's, on a file named after the device in the
folder for temporary files: it ends with its process, however that ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def device_lock(device: str, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold `device` while the block runs; `waiting` is called first when another has it.

    Not reentrant: a process that holds it waits for itself forever.
    """
    handle = _open(lock_path(device))
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def lock_path(device: str) -> Path:
    """The file that stands for a device; it stays, empty."""
    name = hashlib.sha256(device.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"dooly-device-{name}.lock"


def _open(path: Path) -> int:
    try:
        # Reading is enough for a lock, and possible where another user made the file.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
