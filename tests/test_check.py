"""`dooly db check`: what is unsound is found, what is sound is not complained about."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest
from conftest import Dooly
from sample_records import ATTENTION, LINEAR, OCCURRENCES, QWEN, ROPE, SAMPLER, at, store

from dooly_backend.database import Database
from dooly_backend.database.check import CheckReport, check_file
from dooly_backend.database.records import StepCost, StepMeasurement
from dooly_backend.errors import DatabaseError
from dooly_backend.workload import Batch, WorkloadPoint

MEASURED = {
    ROPE: [at("constant", 1.0)],
    LINEAR: [at(f"tokens={n}", n / 3, n / 2.9, n / 2.7) for n in (8, 16, 32)],
    ATTENTION: [at("batch=1x16+0", 5.0)],
    SAMPLER: [at("requests=1", 3.0, 4.0, 9.0, unstable=True)],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "latency.db"
    with Database.open(path, create=True) as database:
        ids = store(database, MEASURED)
        database.skip(LINEAR, ids[1], WorkloadPoint.parse("tokens=99"), "out of memory")
        database.record_step(*ids, StepMeasurement(Batch.prefill(32), 2, (90.0, 91.0, 93.0), 70.0))
        database.set_step_cost(*ids, StepCost(1.0, 2.0, 3.0))
    return path


def damage(path: Path, *statements: str) -> CheckReport:
    """What is found after a stranger's changes, which respect nothing."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    for statement in statements:
        connection.execute(statement)
    connection.close()
    return check_file(path)


def test_a_sound_file(path: Path) -> None:
    before = path.read_bytes()
    assert check_file(path) == CheckReport(())
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_shipped_database_is_sound() -> None:
    assert check_file("builtin:h200") == CheckReport(())


def test_a_profile_that_was_interrupted_is_only_a_note(path: Path) -> None:
    report = damage(path, f"DELETE FROM measurement WHERE signature = '{SAMPLER.hash}'")
    assert report.ok
    (note,) = report.notes
    assert "3 of 4 signatures measured: `dooly profile Qwen/Qwen3-0.6B` goes on" in note


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("UPDATE signature SET canonical = canonical || ' '", "hash .* is not that of its canon"),
        ("UPDATE environment SET facts = '{}'", "environment 1: digest .* of its facts"),
        ("UPDATE environment SET facts = '{'", "environment 1 cannot be read"),
        ("UPDATE configuration SET num_layers = 12", "configuration 1: digest"),
        ("UPDATE workload_point SET num_tokens = 9 WHERE key = 'tokens=8'", "num_tokens disagrees"),
        ("UPDATE workload_point SET key = 'size=8' WHERE key = 'tokens=8'", "is no workload point"),
        ("UPDATE measurement SET median_us = min_us WHERE n = 3", "median_us is .* samples give"),
        ("UPDATE measurement SET samples_us = '[1.0, 2.0]' WHERE n = 3", "n is 3, its samples"),
        ("UPDATE measurement SET samples_us = '[1.0, oops]' WHERE n = 3", "samples cannot be read"),
        ("UPDATE measurement SET samples_us = '[1.0, -2.0]' WHERE n = 3", "samples cannot be read"),
        (
            "UPDATE measurement SET point_id = (SELECT id FROM workload_point "
            "WHERE key = 'requests=1') WHERE median_us < 3 AND n = 3",
            "a point of requests, but the time depends on tokens",
        ),
        (
            "INSERT INTO skipped_point SELECT signature, environment_id, point_id, 'x', '' "
            "FROM measurement",
            "is measured and skipped",
        ),
        ("DELETE FROM occurrence WHERE position = 1", "has gaps: its positions are 0, 2, 3"),
        ("UPDATE occurrence SET count = 27 WHERE position = 1", "runs 27 times in 28 layers"),
        ("UPDATE occurrence SET layers = '[0,]' WHERE position = 1", "layers of .* cannot be read"),
        ("UPDATE step_measurement SET live_median_us = 90.0", "live_median_us is 90.0"),
        ("UPDATE step_measurement SET live_us = '[]'", "with 2 layers cannot be read"),
        ("UPDATE measurement SET unstable = 2", "SQLite finds: CHECK constraint failed"),
        ("DELETE FROM signature WHERE name = 'Sampler'", "does not exist"),
        ("DROP VIEW latency", "latency is missing from the schema"),
        ("ALTER TABLE step_measurement DROP COLUMN measured_at", "step_measurement is not"),
        ("DROP TABLE skipped_point", "skipped_point is missing from the schema"),
        ("DROP INDEX measurement_by_environment", "measurement_by_environment is missing"),
        ("ALTER TABLE measurement ADD COLUMN note TEXT", "measurement is not defined as version"),
        (
            "CREATE TRIGGER t AFTER INSERT ON measurement BEGIN DELETE FROM signature; END",
            "trigger t is none of Dooly's",
        ),
    ],
)  # fmt: skip
def test_what_is_unsound(path: Path, statement: str, says: str) -> None:
    report = damage(path, statement)
    assert not report.ok
    text = "\n".join(report.problems)
    assert re.search(says, text), text


def test_a_point_that_is_there_twice(path: Path) -> None:
    """As a file would have it whose unique index somebody dropped."""
    report = damage(
        path,
        "ALTER TABLE measurement RENAME TO m",
        "CREATE TABLE measurement AS SELECT * FROM m",
        "INSERT INTO measurement SELECT * FROM m WHERE n = 1",
    )
    assert "RotaryTable at constant is there 2 times in one environment" in report.problems


def test_rounding_of_a_statistic_is_no_problem(path: Path) -> None:
    assert damage(path, "UPDATE measurement SET std_us = std_us * (1 + 1e-14)").ok


def test_damaged_pages_are_a_problem(path: Path) -> None:
    data = bytearray(path.read_bytes())
    page = len(data) // 4096 - 2
    data[page * 4096 : (page + 1) * 4096] = b"\x55" * 4096
    path.write_bytes(data)
    report = check_file(path)
    assert not report.ok
    assert any(word in report.problems[0] for word in ("damaged", "SQLite finds"))


def test_a_truncated_file_is_a_problem(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])
    (problem,) = check_file(path).problems
    assert "is truncated" in problem


def test_what_is_no_database_of_ours_is_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("model,latency\n" * 100)
    with pytest.raises(DatabaseError, match="is not a SQLite file"):
        check_file(tmp_path / "x.db")
    with pytest.raises(DatabaseError, match="does not exist"):
        check_file(tmp_path / "none.db")


def test_a_check_beside_a_writer_sees_one_snapshot(path: Path) -> None:
    with Database.open(path) as writer:
        store(writer, {LINEAR: [at("tokens=4096", 1.0)]})
        assert check_file(path).ok
        writer.add_configuration(QWEN, OCCURRENCES[:2])


def test_the_command(dooly: Dooly, path: Path) -> None:
    sound = dooly("db", "check", "--json")
    assert (sound.returncode, json.loads(sound.stdout)) == (
        0,
        {"ok": True, "problems": [], "notes": []},
    )
    assert "latency.db is sound" in dooly("db", "check").stdout
    damage(path, "UPDATE measurement SET median_us = min_us WHERE n = 3")
    unsound = dooly("db", "check", "--json")
    report = json.loads(unsound.stdout)
    assert (unsound.returncode, report["ok"], len(report["problems"])) == (1, False, 4)
    shown = dooly("db", "check", "--db", path)
    assert shown.returncode == 1
    assert shown.stderr == "error: latency.db is not sound: 4 problems\n".replace(
        "latency.db", str(path)
    )
    assert shown.stdout.count("\n") == 4
    assert dooly("db", "check", "--db", "none.db").returncode == 2
