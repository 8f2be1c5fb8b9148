"""Broken files, full disks, killed and competing writers."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sample_records import H200, LINEAR, at, filled

from dooly_backend.database import Database, migrations, opening
from dooly_backend.errors import DatabaseError

ROOT = Path(__file__).resolve().parent.parent
WAYS = [{"read_only": True}, {}, {"create": True}]


def refused(path: Path, match: str, ways: list[dict] = WAYS) -> None:
    """Every way of opening gives a line that names the file, and leaves the folder as it is."""
    before = {file: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}
    for way in ways:
        with pytest.raises(DatabaseError, match=match) as error:
            Database.open(path, **way)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
        assert error.value.exit_code == 2
    after = {file: file.read_bytes() for file in path.parent.iterdir() if file.is_file()}
    assert after == before


# -- files that are not what they should be


def test_a_missing_file_says_what_to_run(tmp_path: Path) -> None:
    path = tmp_path / "latency.db"
    refused(path, f"does not exist: run `dooly profile MODEL --db {path}` first", WAYS[:2])


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="check that its folder exists"):
        Database.open(tmp_path / "no" / "latency.db", create=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    refused(tmp_path, "is a folder")


def test_an_empty_file_has_nothing_to_read(tmp_path: Path) -> None:
    path = tmp_path / "latency.db"
    path.touch()
    refused(path, "is empty: run `dooly profile", WAYS[:2])


@pytest.mark.parametrize("content", [b"x", b"model,latency\n" * 100, b"SQLite format 3\0"])
def test_not_a_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "latency.csv"
    path.write_bytes(content)
    refused(path, "is not a SQLite file")


@pytest.mark.parametrize("table", ["track (title)", "measurement (signature, samples_us)"])
def test_a_sqlite_file_of_another_program(tmp_path: Path, table: str) -> None:
    path = tmp_path / "music.db"
    with sqlite3.connect(path) as connection:
        connection.execute(f"CREATE TABLE {table}")
    connection.close()
    refused(path, "of another program")


def test_a_newer_version_is_left_as_it_is(tmp_path: Path) -> None:
    path = filled(tmp_path / "latency.db", points=3)
    newer = migrations.latest_version() + 1
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {newer}")
    connection.close()
    refused(path, f"schema version {newer}, this dooly knows up to {newer - 1}: upgrade dooly")


@pytest.mark.parametrize("kept", [-100, 8_192])
def test_a_truncated_file(tmp_path: Path, kept: int) -> None:
    path = filled(tmp_path / "latency.db")
    path.write_bytes(path.read_bytes()[:kept])
    refused(path, r"is truncated \(\d+ of \d+ bytes\): restore it")


def test_a_damaged_page_is_an_error_where_it_is_read(tmp_path: Path) -> None:
    path = filled(tmp_path / "latency.db")
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)  # all but the schema's first page
    path.write_bytes(data)

    def use(**way: bool) -> None:
        with Database.open(path, **way) as database:
            database.info()

    for way in WAYS:
        with pytest.raises(DatabaseError, match="is damaged: restore it") as error:
            use(**way)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE measurement SET samples_us = '[1.0, oops]'",
        "UPDATE workload_point SET key = 'size=' || key",
    ],
)
def test_a_row_that_cannot_be_read(tmp_path: Path, damage: str) -> None:
    path = filled(tmp_path / "latency.db", points=3)
    with sqlite3.connect(path) as connection:
        connection.execute(damage)
    connection.close()
    with (
        Database.open(path, read_only=True) as database,
        pytest.raises(DatabaseError, match="holds a row that cannot be read"),
    ):
        database.measurements(LINEAR.hash, 1)


def test_a_missing_table_is_damage(tmp_path: Path) -> None:
    path = filled(tmp_path / "latency.db", points=3)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE skipped_point")
    connection.close()
    with Database.open(path) as database:
        for use in (database.info, lambda: database.record(LINEAR, 1, at("tokens=9", 1.0))):
            with pytest.raises(DatabaseError, match="is damaged"):
                use()
        assert len(database.measurements(LINEAR.hash, 1)) == 3  # nothing half-written


def test_a_closed_database_is_an_error_of_ours(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "latency.db", create=True)
    database.close()
    for use in (database.info, database.configurations, lambda: database.add_environment(H200)):
        with pytest.raises(DatabaseError, match="closed database"):
            use()


def test_a_stranger_s_view_runs_no_function(tmp_path: Path) -> None:
    """Functions that are not known to be harmless do not run from the schema."""
    path = filled(tmp_path / "latency.db", points=1)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP VIEW shared_signature")
        connection.execute(
            "CREATE VIEW shared_signature AS SELECT load_extension('x') AS signature, 1 AS name, 1"
        )
    connection.close()
    with (
        Database.open(path, read_only=True) as database,
        pytest.raises(DatabaseError, match="unsafe use"),
    ):
        database.info()


# -- where one may not write


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder, and a user whom permissions bind (root's are unlimited)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if os.geteuid() == 0:
            os.chown(folder, 65534, -1)
            os.seteuid(65534)
            try:
                yield folder
            finally:
                os.seteuid(0)
        else:
            yield folder
        os.chmod(folder, 0o755)


def test_a_read_only_file(unprivileged: Path) -> None:
    path = filled(unprivileged / "latency.db", points=3)
    path.chmod(0o444)
    unprivileged.chmod(0o555)
    refused(path, "is read-only: make the file and its folder writable", WAYS[1:])
    with Database.open(path, read_only=True) as database:
        assert database.info().measurements == 3
    unprivileged.chmod(0o755)
    with pytest.raises(DatabaseError, match="is read-only"):
        Database.open(path)
    with Database.open(path, read_only=True) as database:
        assert database.info().measurements == 3


def test_a_read_only_folder(unprivileged: Path) -> None:
    path = filled(unprivileged / "latency.db", points=3)
    unprivileged.chmod(0o555)
    refused(path, "is read-only", WAYS[1:])
    with pytest.raises(DatabaseError, match="you may read and write there"):
        Database.open(unprivileged / "new.db", create=True)


def test_a_file_that_one_may_not_read(unprivileged: Path) -> None:
    path = filled(unprivileged / "latency.db", points=3)
    path.chmod(0)
    for way in WAYS:
        with pytest.raises(DatabaseError, match="cannot be opened: check"):
            Database.open(path, **way)


def test_a_locked_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "BUSY_SECONDS", 0.1)
    path = filled(tmp_path / "latency.db", points=3)
    other = sqlite3.connect(path, isolation_level=None)
    with Database.open(path) as database:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DatabaseError, match="locked by another process"):
            database.record(LINEAR, 1, at("tokens=9", 1.0))
        assert len(database.measurements(LINEAR.hash, 1)) == 3  # readers do not wait
        other.execute("ROLLBACK")
        assert database.record(LINEAR, 1, at("tokens=9", 1.0))
    other.close()
