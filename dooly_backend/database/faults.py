"""What went wrong with a database file, and what the user can do about it."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dooly_backend.errors import DamagedError, DatabaseError

BUSY_SECONDS = 30.0
"""How long an operation waits for other writers before it gives up."""

_DISK_FULL = (
    "the disk is full or a file-size limit is reached: free some space and run again; "
    "what was recorded before is kept"
)
_READ_ONLY = "is read-only: make the file and its folder writable, or give another --db"
_DAMAGED = (
    "is damaged: restore it from a copy, or try "
    "`sqlite3 DAMAGED.db .recover | sqlite3 RECOVERED.db`"
)
_NO_DATABASE = "is not a SQLite file: give a file that `dooly profile` wrote"
_UNREACHABLE = (
    "cannot be opened: check that its folder exists and that you may read and write there"
)

# By SQLite's primary result codes; an extended code keeps the primary one in its low byte.
_ADVICE = {
    sqlite3.SQLITE_FULL: f"cannot be written: {_DISK_FULL}",
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: _UNREACHABLE,
    sqlite3.SQLITE_BUSY: (
        f"has been locked by another process for {BUSY_SECONDS:.0f} s: "
        "wait until it ends, and run again"
    ),
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _NO_DATABASE,
}
# What a write beyond the end of a full disk or of RLIMIT_FSIZE gives.
_NO_SPACE = {
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_SHMMAP,
}


def primary_code(error: sqlite3.Error) -> int | None:
    """SQLite's primary result code; None for errors of the Python module itself."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def explain(error: sqlite3.Error | OSError, path: Path | str) -> str:
    """One line: what is wrong with the database at `path`, and what to do."""
    if isinstance(error, OSError):
        return f"database {path} {_explain_os(error)}"
    if getattr(error, "sqlite_errorcode", None) in _NO_SPACE:
        return f"database {path} cannot be written: {_DISK_FULL} ({error})"
    code = primary_code(error)
    if code in _ADVICE:
        return f"database {path} {_ADVICE[code]} ({error})"
    if code == sqlite3.SQLITE_CONSTRAINT:
        return f"database {path} refuses a row, nothing of it was kept: {error}"
    if code == sqlite3.SQLITE_ERROR and "no such" in str(error):
        return f"database {path} {_DAMAGED} ({error})"
    return f"database {path} cannot be used: {error}; `dooly db check` tells whether it is sound"


def fault(error: sqlite3.Error | OSError, path: Path | str) -> DatabaseError:
    """`error` as one of ours, with its explanation."""
    message = explain(error, path)
    return DamagedError(message) if _DAMAGED in message else DatabaseError(message)


def _explain_os(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return f"cannot be written: {_DISK_FULL} ({reason})"
    if error.errno == errno.EROFS:
        return f"{_READ_ONLY} ({reason})"
    return f"{_UNREACHABLE} ({reason})"


def damaged_row(error: Exception, path: Path | str) -> DatabaseError:
    """A row that does not hold what its columns promise."""
    return DamagedError(f"database {path} holds a row that cannot be read and {_DAMAGED} ({error})")


@contextmanager
def explained(path: Path | str) -> Iterator[None]:
    """Turn SQLite's and the system's errors into DatabaseError."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise fault(error, path) from error
