"""Broken files, full disks, killed and competing writers."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sample_records import H200, LINEAR, at, store

from dooly_backend.database import Database, faults, migrations, opening
from dooly_backend.errors import DatabaseError

ROOT = Path(__file__).resolve().parent.parent
WAYS = [{"read_only": True}, {}, {"create": True}]


def filled(path: Path, points: int = 500) -> Path:
    with Database.open(path, create=True) as database:
        store(database, {LINEAR: [at(f"tokens={n}", *[n / 3] * 20) for n in range(1, points + 1)]})
    return path


def measured(path: Path) -> set[int | None]:
    """Token counts of the file's measurements, after SQLite's own check of it."""
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    with Database.open(path, read_only=True) as database:
        environments = database.environments()
        return {
            m.point.num_tokens for i in environments for m in database.measurements(LINEAR.hash, i)
        }


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


# -- a full disk, killed and competing writers: in processes of their own

WRITER = """
import resource, sys
from pathlib import Path
from dooly_backend.database import Database
from dooly_backend.errors import DatabaseError
from dooly_backend.database.records import StepMeasurement
from dooly_backend.workload import Batch
from sample_records import H200, LINEAR, QWEN, at

path, first, last, samples, limit = Path(sys.argv[1]), *map(int, sys.argv[2:6])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    with Database.open(path, create=True) as database:
        environment_id = database.add_environment(H200)
        configuration_id = database.add_configuration(QWEN, [])
        for n in range(first, last):
            step = StepMeasurement(Batch.prefill(n), 1, (2.0,), 1.0)
            database.record_step(configuration_id, environment_id, step)
            new = database.record(LINEAR, environment_id, at(f"tokens={n}", *[n / 3] * samples))
            sys.stdout.write(f"{n} {int(new)}\\n")
            sys.stdout.flush()
except DatabaseError as error:
    sys.exit(f"{error}")
"""

Writer = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def writer() -> Iterator[Writer]:
    """Start a process that records points, and prints each once it is recorded."""
    started: list[subprocess.Popen[str]] = []

    def start(
        path: Path, first: int, last: int, *, samples: int = 20, limit: int = 0
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, *map(str, (path, first, last, samples, limit))],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def printed(output: str) -> dict[int, bool]:
    """Points that a writer reported, and whether it was the one that stored them."""
    lines = [line.split() for line in output.splitlines(keepends=True) if line.endswith("\n")]
    return {int(point): new == "1" for point, new in lines}


@pytest.mark.parametrize("limit", [1, 1000, 10_000, 60_000])
def test_a_full_disk_leaves_no_stub_of_a_new_file(
    tmp_path: Path, writer: Writer, limit: int
) -> None:
    process = writer(tmp_path / "latency.db", 1, 2, limit=limit)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert "disk is full or a file-size limit is reached: free some space" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_keeps_what_was_recorded(tmp_path: Path, writer: Writer) -> None:
    path = tmp_path / "latency.db"
    process = writer(path, 1, 5000, samples=200, limit=400_000)
    output, error = process.communicate(timeout=60)
    recorded = printed(output)
    assert process.returncode == 1
    assert "free some space and run again; what was recorded before is kept" in error
    assert len(recorded) > 5
    assert measured(path) == set(recorded)

    # With space again, the next run continues.
    rest = writer(path, 1, len(recorded) + 10)
    output, error = rest.communicate(timeout=60)
    assert (rest.returncode, error) == (0, "")
    assert [n for n, new in printed(output).items() if new] == list(
        range(len(recorded) + 1, len(recorded) + 10)
    )


def test_errors_of_a_full_disk_from_the_system_itself() -> None:
    for number in ("ENOSPC", "EFBIG", "EDQUOT"):
        code = getattr(faults.errno, number)
        text = faults.explain(OSError(code, os.strerror(code)), "latency.db")
        assert text.startswith("database latency.db cannot be written: the disk is full")


@pytest.mark.parametrize("after", [1, 37, 150])
def test_a_killed_writer_loses_nothing(tmp_path: Path, writer: Writer, after: int) -> None:
    path = tmp_path / "latency.db"
    process = writer(path, 1, 100_000, samples=100)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(after)]
    process.send_signal(signal.SIGKILL)
    recorded = set(printed("".join(lines) + process.stdout.read()))
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert len(recorded) >= after
    # Committed but not yet printed: at most the one that was under way.
    assert recorded <= measured(path) <= recorded | {len(recorded) + 1}


DYING_CREATOR = """
import os, signal, sys
from dooly_backend.database import Database, migrations, opening

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def statements(number):
    yield from migrations_before[:number]
    die()

path, stage = sys.argv[1:]
migrations_before = migrations.VERSION_1
if stage == "log":
    opening._use_write_ahead_log = die
else:
    migrations.VERSION_1 = statements(int(stage))
Database.open(path, create=True)
"""


@pytest.mark.parametrize("stage", ["0", "5", "log"])
def test_killed_while_it_creates_the_file(tmp_path: Path, writer: Writer, stage: str) -> None:
    """Whatever is left can be opened again."""
    path = tmp_path / "latency.db"
    killed = subprocess.run(
        [sys.executable, "-c", DYING_CREATOR, path, stage],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert path.exists()
    _, error = writer(path, 1, 3).communicate(timeout=60)
    assert error == ""
    assert measured(path) == {1, 2}


def test_a_transaction_takes_its_lock_before_it_reads(tmp_path: Path) -> None:
    """One that reads first is refused at once, not kept waiting, when another has written since."""
    path = filled(tmp_path / "latency.db", points=1)
    other = sqlite3.connect(path, isolation_level=None, timeout=0)
    with Database.open(path) as database:
        with database.writing(), pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.execute("BEGIN IMMEDIATE")  # free again
        other.execute("ROLLBACK")
    other.close()


def test_two_writers_store_each_point_once(tmp_path: Path, writer: Writer) -> None:
    """They create the file together, then record the same points."""
    path = tmp_path / "latency.db"
    processes = [writer(path, 1, 201) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [(p.returncode, error) for p, (_, error) in zip(processes, outputs, strict=True)] == [
        (0, ""),
        (0, ""),
    ]
    one, other = (printed(output) for output, _ in outputs)
    assert set(one) == set(other) == measured(path) == set(range(1, 201))
    assert all(one[n] != other[n] for n in one)  # exactly one of them stored it
    with sqlite3.connect(path) as connection:
        counts = [
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("measurement", "step_measurement", "workload_point", "environment")
        ]
    connection.close()
    assert counts == [200, 200, 200, 1]


def test_looking_at_a_file_keeps_the_locks_of_this_process(tmp_path: Path, writer: Writer) -> None:
    """Closing a file drops all locks that its process holds on it: POSIX."""
    path = filled(tmp_path / "latency.db", points=3)
    with Database.open(path) as database:
        database.record(LINEAR, 1, at("tokens=4", 1.0))
        with pytest.raises(DatabaseError, match="is a folder"):
            Database.open(tmp_path)
        Database.open(path, read_only=True).close()
        Database.open(path).close()
        # The last one to close a file removes its log: another process must see that we are here.
        assert writer(path, 5, 7).wait(timeout=60) == 0
        assert path.with_name("latency.db-wal").exists()
        database.record(LINEAR, 1, at("tokens=7", 1.0))
    assert measured(path) == set(range(1, 8))
