"""Broken and full places through the commands: one line, the right exit code, nothing changed."""

from __future__ import annotations

import sqlite3
import subprocess
from pathlib import Path

import pytest
from conftest import Dooly
from sample_records import CPU, LINEAR, at, store

from dooly_backend.database import Database, migrations

#: Every command that opens a database, without `--json`. FILE is the broken one.
READING = {
    "info": ["db", "info", "--db", "FILE"],
    "export": ["db", "export", "--db", "FILE", "-o", "out"],
    "diff": ["db", "diff", "FILE", "good.db"],
    "merge from": ["db", "merge", "good.db", "FILE"],
    "tables": ["export", "--to", "vidur", "--db", "FILE", "-o", "out"],
}
WRITING = {
    "merge into": ["db", "merge", "FILE", "good.db"],
}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return filled(tmp_path / "good.db", 3)


def filled(path: Path, points: int, first: int = 1) -> Path:
    with Database.open(path, create=True) as database:
        samples = [at(f"tokens={n}", *[n / 3] * 20) for n in range(first, first + points)]
        store(database, {LINEAR: samples}, environment=CPU)
    return path


def run(dooly: Dooly, arguments: list[str], file: str, **how: int) -> subprocess.CompletedProcess:
    return dooly(*(argument.replace("FILE", file) for argument in arguments), **how)


def one_line(result: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert result.returncode == code, result.stdout + result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize("command", [*READING, *WRITING])
def test_a_newer_version(dooly: Dooly, good: Path, tmp_path: Path, command: str) -> None:
    path = filled(tmp_path / "newer.db", 3)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {migrations.latest_version() + 1}")
    connection.close()
    before = contents(tmp_path)
    result = run(dooly, (READING | WRITING)[command], path.name)
    assert "newer.db has schema version" in one_line(result)
    assert "upgrade dooly" in result.stderr
    assert contents(tmp_path) == before
    assert one_line(dooly("db", "check", "--db", path.name))  # wrong input, no problem of it


@pytest.mark.parametrize("command", [*READING, *WRITING])
@pytest.mark.parametrize("lost", [100, 40_000])
def test_a_truncated_file(
    dooly: Dooly, good: Path, tmp_path: Path, command: str, lost: int
) -> None:
    path = filled(tmp_path / "cut.db", 200)
    path.write_bytes(path.read_bytes()[:-lost])
    before = contents(tmp_path)
    message = one_line(run(dooly, (READING | WRITING)[command], path.name))
    assert "cut.db is truncated" in message or "cut.db is damaged" in message
    assert "restore it from a copy" in message
    assert contents(tmp_path) == before


def test_a_disk_that_fills_up_during_a_merge(dooly: Dooly, good: Path, tmp_path: Path) -> None:
    """All of it is one transaction: nothing of it stays, and with space it goes on."""
    source = filled(tmp_path / "large.db", 2000, first=100)
    with Database.open(good, read_only=True) as database:
        before = database.info()
    message = one_line(dooly("db", "merge", "good.db", source.name, file_limit=250_000))
    assert "good.db cannot be written: the disk is full" in message
    assert "free some space and run again" in message
    with Database.open(good, read_only=True) as database:
        assert database.info().measurements == before.measurements
    assert dooly("db", "check", "--db", "good.db").returncode == 0
    assert dooly("db", "merge", "good.db", source.name).returncode == 0
    with Database.open(good, read_only=True) as database:
        assert database.info().measurements == before.measurements + 2000


def test_a_disk_that_fills_up_during_an_export(dooly: Dooly, tmp_path: Path) -> None:
    filled(tmp_path / "large.db", 2000)
    result = dooly("db", "export", "--db", "large.db", "-o", "out", file_limit=20_000)
    assert "no space left to write" in one_line(result)
    assert not list((tmp_path / "out").glob("*.part"))
    assert not (tmp_path / "out" / "measurement.parquet").exists()


def test_a_full_disk_makes_no_stub(dooly: Dooly, good: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    one_line(dooly("db", "merge", "new.db", "good.db", file_limit=40_000))
    assert contents(tmp_path) == before


def test_a_merge_into_a_shipped_database(dooly: Dooly, good: Path, tmp_path: Path) -> None:
    result = dooly("db", "merge", "builtin:h200", "good.db")
    assert "cannot be written: give a file of your own" in one_line(result)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["good.db"]
