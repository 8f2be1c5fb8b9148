"""The file of a database: its schema, how it is opened, and how old ones migrate."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sample_records import (
    ALL_MEASURED,
    CPU,
    LINEAR,
    at,
    query,
    signature,
    store,
)
from sqlite_utils.migrations import Migrations

from dooly_backend.database import Database, migrations
from dooly_backend.errors import DatabaseError, InputError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "latency.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with Database.open(path, create=True) as database:
        yield database


# -- the schema


def test_the_schema_reads_like_documentation(database: Database, path: Path) -> None:
    statements = query(path, "SELECT name, type, sql FROM sqlite_master WHERE sql NOT NULL")
    documented = {name: sql for name, kind, sql in statements if kind in ("table", "view")}
    assert len(documented) >= 14
    for name, sql in documented.items():
        second_line = sql.splitlines()[1].strip()
        assert second_line.startswith("-- "), f"{name} does not say what it holds"
        assert len(second_line) > 20, name


def test_times_are_named_by_their_unit(database: Database, path: Path) -> None:
    """Every REAL column that is no ratio, and every column that holds samples, ends in _us."""
    tables = [n for (n,) in query(path, "SELECT name FROM sqlite_master WHERE type = 'table'")]
    times = set()
    for table in tables:
        for _, column, kind, *_ in query(path, f"PRAGMA table_info({table})"):
            assert kind in ("TEXT", "INTEGER", "REAL"), (table, column)
            known = ("_us", "_ratio", "_percent")
            assert (kind == "REAL") <= column.endswith(known), (table, column)
            if column.endswith("_us"):
                times.add(column)
    assert {"samples_us", "min_us", "p25_us", "median_us", "mean_us", "max_us", "std_us"} <= times


def test_comments_stay_aligned_with_the_tables(path: Path, database: Database) -> None:
    """Every column of every table with one line each is listed once in the statement."""
    for name, sql in query(path, "SELECT name, sql FROM sqlite_master WHERE type = 'table'"):
        columns = [row[1] for row in query(path, f"PRAGMA table_info({name})")]
        written = re.findall(r"^    (\w+) +(?:TEXT|INTEGER|REAL)\b", sql, flags=re.MULTILINE)
        assert written == columns, name


def test_the_file_says_whose_it_is(database: Database, path: Path) -> None:
    assert query(path, "PRAGMA application_id") == [(int.from_bytes(b"dool", "big"),)]
    assert query(path, "PRAGMA user_version") == [(migrations.latest_version(),)]
    assert query(path, "PRAGMA journal_mode") == [("wal",)]
    done = query(path, "SELECT migration_set, name FROM _sqlite_migrations ORDER BY id")
    assert done[0] == ("dooly", "m001_latency_tables")
    assert len(done) == migrations.latest_version()


def test_foreign_keys_and_checks_hold(database: Database, path: Path) -> None:
    store(database, ALL_MEASURED)
    assert query(path, "PRAGMA foreign_key_check") == []
    for statement in (
        "UPDATE signature SET kind = 'weather'",
        "UPDATE measurement SET samples_us = '[1.0'",
        "UPDATE measurement SET min_us = median_us + 1",
        "UPDATE occurrence SET count = 0",
        "UPDATE workload_point SET batch = NULL WHERE kind = 'batch'",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
            query(path, statement)


# -- opening


def test_closing_leaves_one_file(path: Path) -> None:
    with Database.open(path, create=True) as database:
        store(database, ALL_MEASURED)
    with Database.open(path, read_only=True) as database:
        assert database.info().measurements == 6
    assert [file.name for file in path.parent.iterdir()] == ["latency.db"]


def test_an_empty_file_can_be_filled(path: Path) -> None:
    path.touch()
    with Database.open(path, create=True) as database:
        store(database, ALL_MEASURED)
        assert database.info().measurements == 6


def test_opening_without_create_continues_a_file(path: Path) -> None:
    with Database.open(path, create=True) as database:
        ids = store(database, {})
    with Database.open(str(path)) as database:
        assert database.record(LINEAR, ids[1], at("tokens=8", 1.0))
    with Database.open(path, create=True) as database:  # does not start anew
        assert database.settled_points(LINEAR.hash, ids[1]) == {"tokens=8"}


def test_a_path_may_hold_any_character(tmp_path: Path) -> None:
    path = tmp_path / "50% off?#1 ü.db"
    with Database.open(path, create=True) as database:
        store(database, ALL_MEASURED)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_read_only_writes_nothing(path: Path) -> None:
    with Database.open(path, create=True) as database:
        ids = store(database, ALL_MEASURED)
    before = path.read_bytes()
    with Database.open(path, read_only=True) as database:
        assert len(database.measurements(LINEAR.hash, ids[1])) == 2
        with pytest.raises(DatabaseError, match="for reading only"):
            database.record(LINEAR, ids[1], at("tokens=8", 1.0))
        with pytest.raises(DatabaseError, match="for reading only"):
            database.add_environment(CPU)
    assert path.read_bytes() == before


def test_an_unknown_builtin_is_wrong_input() -> None:
    with pytest.raises(InputError, match="no built-in database 'h900'"):
        Database.open("builtin:h900", read_only=True)
    with pytest.raises(InputError, match="cannot be written"):
        Database.open("builtin:h900", create=True)


# -- migrations


@pytest.fixture
def next_version(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """A file of today's version with measurements, and a program that is one ahead."""
    with Database.open(path, create=True) as database:
        store(database, ALL_MEASURED)
    newer = Migrations("dooly")
    for name, step in vars(migrations).items():
        if re.match(r"m\d{3}_", name):
            newer()(step)

    @newer()
    def m999_example(db) -> None:
        db.execute("ALTER TABLE environment ADD COLUMN host TEXT")
        db.execute("UPDATE environment SET host = 'unknown'")

    monkeypatch.setattr(migrations, "MIGRATIONS", newer)


@pytest.mark.usefixtures("next_version")
def test_an_old_file_migrates_when_it_is_opened_for_writing(path: Path) -> None:
    with Database.open(path) as database:
        assert database.info().schema_version == migrations.latest_version()
        assert database.info().measurements == 6
    assert query(path, "SELECT host FROM environment") == [("unknown",)]
    names = [name for (name,) in query(path, "SELECT name FROM _sqlite_migrations ORDER BY id")]
    assert (names[0], names[-1]) == ("m001_latency_tables", "m999_example")
    assert len(names) == migrations.latest_version()


@pytest.mark.usefixtures("next_version")
def test_an_old_file_is_read_without_touching_it(path: Path) -> None:
    before = path.read_bytes()
    with Database.open(path, read_only=True) as database:
        assert database.info().schema_version == migrations.latest_version()
        assert database.info().measurements == 6
    assert path.read_bytes() == before


@pytest.mark.usefixtures("next_version")
def test_a_migration_that_fails_changes_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @migrations.MIGRATIONS()
    def m999_broken(db) -> None:
        db.execute("DROP TABLE measurement")
        db.execute("DROP TABLE no_such_table")

    with pytest.raises(DatabaseError, match="no_such_table"):
        Database.open(path)
    assert query(path, "PRAGMA user_version") == [(migrations.latest_version() - 2,)]
    assert query(path, "SELECT count(*) FROM measurement") == [(6,)]
    assert "host" not in [row[1] for row in query(path, "PRAGMA table_info(environment)")]


def test_a_graph_of_version_1_goes_to_where_it_was_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Migrations("dooly")
    first()(migrations.m001_latency_tables)
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", first)
        with Database.open(path, create=True):
            pass
    connection = sqlite3.connect(path, isolation_level=None)
    hashes = {"m": signature("Measured").hash, "n": signature("Nowhere").hash}
    for name, value in hashes.items():
        connection.execute(
            "INSERT INTO signature VALUES (?, ?, 'module', 'tokens', '{}')", (value, name)
        )
    point = "INSERT INTO workload_point (key, kind, num_tokens) VALUES ('t', 'tokens', 1)"
    connection.execute(point)
    for n, engine in enumerate(("vllm", "vllm", "vidur"), start=1):
        connection.execute(
            "INSERT INTO environment VALUES (?, ?, 'd', 'cpu', ?, '1', '{}', '')",
            (n, "e" * 63 + str(n), engine),
        )
    for n, key in ((1, "m"), (2, "n")):
        connection.execute(
            "INSERT INTO configuration VALUES"
            " (?, ?, 'm', 'vllm', 'b', 'd', 'k', 16, 1, 1, 'eager', 2, '{}', '{}', '')",
            (n, "c" * 63 + str(n)),
        )
        place = "INSERT INTO occurrence VALUES (?, 0, 'p', 'M', ?, 1, '[]')"
        connection.execute(place, (n, hashes[key]))
    for environment in (2, 3):
        connection.execute(
            "INSERT INTO measurement VALUES"
            " (NULL, ?, ?, 1, 1, '[1.0]', 1, 1, 1, 1, 1, 1, 0, 0, '')",
            (hashes["m"], environment),
        )
    connection.close()
    with Database.open(path):
        pass
    places = query(path, "SELECT configuration_id, environment_id FROM occurrence")
    assert places == [(1, 2), (2, None)]
