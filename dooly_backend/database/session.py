"""An open file: its transactions, and what they need.

The store and everything beside it (checks, merges, claims) work in these
transactions; errors of SQLite and of damaged rows leave them as DatabaseErrors.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from dooly_backend.database.faults import damaged_row, explained
from dooly_backend.database.rows import matching
from dooly_backend.errors import DatabaseError, InputError


class Session:
    """A connection to the file at `path`; a context manager."""

    def __init__(self, connection: sqlite3.Connection, path: Path, *, read_only: bool) -> None:
        self._connection = connection
        self.path = path
        self.read_only = read_only

    def close(self) -> None:
        """Release the file. What was recorded is safe without it, too."""
        with explained(self.path):
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, read_only={self.read_only})"

    # -- transactions ----------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: everything in it, or nothing."""
        if self.read_only:
            raise DatabaseError(f"database {self.path} was opened for reading only")
        with explained(self.path):
            # Take the write lock at once: a transaction that reads first cannot wait for it.
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """One snapshot; rows that break their columns' promise are DatabaseErrors."""
        with explained(self.path):
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            except (ValueError, TypeError, KeyError, InputError) as error:
                raise damaged_row(error, self.path) from error
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    # -- inside a transaction --------------------------------------------------

    def _execute(self, statement: str, values: Sequence | dict = ()) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _id(self, table: str, column: str, value: str) -> int:
        found = self._execute(f"SELECT id FROM {table} WHERE {column} = ?", (value,))
        return found.fetchone()["id"]

    def _exists(self, table: str, key: dict) -> bool:
        found = self._execute(f"SELECT 1 FROM {table} WHERE {matching(key)}", key)
        return found.fetchone() is not None

    def _delete(self, table: str, key: dict) -> None:
        self._execute(f"DELETE FROM {table} WHERE {matching(key)}", key)
