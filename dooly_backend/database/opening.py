"""Opening a latency database: is the file one of ours, and of which version?

A file that is not ours, is newer than this program, or is cut short is refused
before anything may change it: the first look is through an immutable
connection, which takes no lock and writes no byte. It is SQLite that looks:
closing a file that Python has opened would drop the locks of every other
connection of this process (https://sqlite.org/howtocorrupt.html, 2.2).
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from dooly_backend.database import migrations
from dooly_backend.database.faults import BUSY_SECONDS, explained, fault, primary_code
from dooly_backend.errors import DamagedError, DatabaseError

_LOG_SECONDS = 5.0


def open_for_writing(path: Path, *, create: bool) -> sqlite3.Connection:
    """A connection that may write, of the latest version. Raises DatabaseError."""
    created = create and _create_empty(path)
    try:
        _check_file(path, blank_allowed=create)
        _check_writable(path)
        with explained(path), _closed_on_error(_connect(path, "mode=rw")) as connection:
            _check_version(path, migrations.version_of(connection))
            migrations.migrate(connection)
            connection.execute("PRAGMA foreign_keys = ON")
            _use_write_ahead_log(connection)
            return connection
    except BaseException:
        if created:
            _remove(path)
        raise


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, of the latest version. Raises DatabaseError.

    An older file is migrated in memory. A file in a folder that is read-only
    is opened without locks, unless a writer has left it unfinished.
    """
    _check_file(path, blank_allowed=False)
    try:
        # Not mode=ro: it leaves an empty -wal and -shm behind.
        connection = _connect(path, "mode=rw")
    except sqlite3.OperationalError as error:
        if _has_log(path) or primary_code(error) not in (
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_READONLY,
            sqlite3.SQLITE_IOERR,
        ):
            raise fault(error, path) from error
        with explained(path):
            connection = _connect(path, "immutable=1")
    except sqlite3.Error as error:
        raise fault(error, path) from error
    with explained(path), _closed_on_error(connection):
        version = migrations.version_of(connection)
        _check_version(path, version)
        if version < migrations.latest_version():
            connection = _migrated_copy(connection)
        connection.execute("PRAGMA query_only = ON")
        return connection


def _connect(path: Path, how: str) -> sqlite3.Connection:
    """Open, and read something, since SQLite opens lazily. Raises sqlite3.Error."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}", uri=True, timeout=BUSY_SECONDS, isolation_level=None
    )
    with _closed_on_error(connection):
        connection.row_factory = sqlite3.Row
        # A database from a stranger is data: no views or triggers with side effects.
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return connection


@contextmanager
def _closed_on_error(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def _create_empty(path: Path) -> bool:
    """Make an empty file unless there is one; true when this call made it."""
    with explained(path):
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            return False
    return True


def _check_file(path: Path, *, blank_allowed: bool) -> None:
    """Refuse what is not a whole latency database of a version we know."""
    if path.is_dir():
        raise DatabaseError(f"database {path} is a folder: give a file")
    with explained(path):
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DatabaseError(
                f"database {path} does not exist: run `dooly profile MODEL --db {path}` first"
            ) from None
    if not size:
        if blank_allowed:
            return
        raise DatabaseError(
            f"database {path} is empty: run `dooly profile MODEL --db {path}` first"
        )
    # An unfinished write-ahead log or journal holds what the file still lacks.
    whole = not _has_log(path)
    with explained(path):
        try:
            with closing(_connect(path, "immutable=1")) as connection:
                pages, page_bytes, application_id, version = (
                    connection.execute(f"PRAGMA {name}").fetchone()[0]
                    for name in ("page_count", "page_size", "application_id", "user_version")
                )
        except sqlite3.DatabaseError as error:
            if primary_code(error) == sqlite3.SQLITE_CORRUPT:
                if not whole:
                    return
                _check_length(path, size, *_header(path))  # the schema may lie in what is cut off
            raise
    if not pages:
        raise DatabaseError(
            f"database {path} is not a SQLite file: give a file that `dooly profile` wrote"
        )
    if application_id != migrations.APPLICATION_ID:
        raise DatabaseError(
            f"database {path} is a SQLite file of another program: "
            "give a file that `dooly profile` wrote"
        )
    _check_version(path, version)
    if whole:
        _check_length(path, size, pages, page_bytes)


def _check_length(path: Path, size: int, pages: int, page_bytes: int) -> None:
    if size < pages * page_bytes:
        raise DamagedError(
            f"database {path} is truncated ({size} of {pages * page_bytes} bytes): "
            "restore it from a copy, or profile again into a new --db"
        )


def _header(path: Path) -> tuple[int, int]:
    """Pages and bytes of a page, as a SQLite file's first hundred bytes say."""
    with path.open("rb") as file:
        header = file.read(100)
    page_bytes = int.from_bytes(header[16:18], "big")
    return int.from_bytes(header[28:32], "big"), 65536 if page_bytes == 1 else page_bytes


def _check_writable(path: Path) -> None:
    """Refuse at once what only the first row would find out."""
    effective = os.access in os.supports_effective_ids
    for place in (path, path.parent):
        if not os.access(place, os.W_OK, effective_ids=effective):
            raise DatabaseError(
                f"database {path} is read-only: make the file and its folder writable, "
                "or give another --db"
            )


def _check_version(path: Path, version: int) -> None:
    latest = migrations.latest_version()
    if version > latest:
        raise DatabaseError(
            f"database {path} has schema version {version}, this dooly knows up to {latest}: "
            "upgrade dooly (pip install -U dooly-backend)"
        )


def _has_log(path: Path) -> bool:
    sidecars = (path.with_name(path.name + end) for end in ("-wal", "-journal"))
    return any(file.exists() and file.stat().st_size > 0 for file in sidecars)


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Let readers and a writer work side by side, where the file system can."""
    deadline = time.monotonic() + _LOG_SECONDS
    while time.monotonic() < deadline:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if primary_code(error) != sqlite3.SQLITE_BUSY:
                raise
            time.sleep(0.02)  # SQLite does not wait for this lock itself
    # Others keep it busy. Without the log the file is as safe, and the next writer tries again.


def _migrated_copy(connection: sqlite3.Connection) -> sqlite3.Connection:
    with closing(connection):
        copy = sqlite3.connect(":memory:", isolation_level=None)
        with _closed_on_error(copy):
            copy.row_factory = sqlite3.Row
            connection.backup(copy)
            migrations.migrate(copy)
    return copy


def _remove(path: Path) -> None:
    for end in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + end).unlink(missing_ok=True)
