"""Who measures what: claims of the workers that share a database.

A worker is a process; what it claims, no other one measures. Claims outlive
nobody: those of a process of this host that is gone (a killed one releases
nothing) are void at once, those of another host when it has not been heard of
for a while.

    with Claims(database, environment_id) as claims:
        for text in claims.take(["HASH tokens=8", "HASH tokens=16"]):
            ...
            claims.release([text])
"""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType

from dooly_backend.database import rows
from dooly_backend.database.session import Session

#: A worker of another host that was not heard of for so long is taken for dead. A batch
#: takes seconds; every take and release counts as a sign of life.
SILENT_MINUTES = 30


class Claims:
    """This process as a worker in one environment; a context manager that releases all."""

    def __init__(self, database: Session, environment_id: int) -> None:
        self._database = database
        self._environment_id = environment_id
        self._worker_id: int | None = None

    def __enter__(self) -> Claims:
        columns = {
            "host": this_host(),
            "pid": os.getpid(),
            "started": started(os.getpid()) or "",
            "seen_at": rows.now(),
        }
        with self._database.writing() as connection:
            self._worker_id = connection.execute(
                rows.insertion("worker", columns), columns
            ).lastrowid
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._database.writing() as connection:
            connection.execute("DELETE FROM worker WHERE id = ?", (self._worker_id,))

    def take(self, texts: Sequence[str]) -> list[str]:
        """Those of `texts` that nobody else has claimed; they are ours now."""
        with self._database.writing() as connection:
            self._alive(connection)
            _forget_the_dead(connection)
            taken = []
            for text in texts:
                values = (self._environment_id, text, self._worker_id)
                connection.execute("INSERT OR IGNORE INTO claim VALUES (?, ?, ?)", values)
                owner = connection.execute(
                    "SELECT worker_id FROM claim WHERE environment_id = ? AND what = ?", values[:2]
                ).fetchone()
                if owner["worker_id"] == self._worker_id:
                    taken.append(text)
        return taken

    def release(self, texts: Iterable[str]) -> None:
        """Leave them to others, or drop them once they are settled."""
        with self._database.writing() as connection:
            connection.executemany(
                "DELETE FROM claim WHERE environment_id = ? AND what = ? AND worker_id = ?",
                [(self._environment_id, text, self._worker_id) for text in texts],
            )

    def _alive(self, connection: sqlite3.Connection) -> None:
        """Say that we are; another host may have taken us for dead."""
        values = (self._worker_id, this_host(), os.getpid(), started(os.getpid()) or "", rows.now())
        connection.execute(
            "INSERT INTO worker VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at",
            values,
        )


def workers(database: Session) -> int:
    """How many live processes measure into this database."""
    with database.reading() as connection:
        return sum(_is_alive(row) for row in connection.execute("SELECT * FROM worker"))


def _forget_the_dead(connection: sqlite3.Connection) -> None:
    for row in connection.execute("SELECT * FROM worker").fetchall():
        if not _is_alive(row):
            connection.execute("DELETE FROM worker WHERE id = ?", (row["id"],))


def _is_alive(row: sqlite3.Row) -> bool:
    if row["host"] == this_host():
        return (started(row["pid"]) or "gone") == row["started"]
    silent = datetime.now(UTC) - datetime.fromisoformat(row["seen_at"])
    return silent < timedelta(minutes=SILENT_MINUTES)


def this_host() -> str:
    """Where process ids mean the same: a host since its boot, and a container of it."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    try:
        return f"{socket.gethostname()} {boot.read_text().strip()} {os.readlink(pids)}"
    except OSError:  # not Linux
        return socket.gethostname()


def started(pid: int) -> str | None:
    """When the process of that number was started, so that a later one of its number is another.

    None for one that is gone; a killed one that its parent has not collected yet is gone.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _exists(pid)
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]  # `man 5 proc`: field 22 of all


def _exists(pid: int) -> str | None:
    """For systems without /proc: a running process, whenever it was started."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "running"
    return "running"
