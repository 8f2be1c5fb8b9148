"""Writers that are killed, compete or run out of space: nothing recorded is lost."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sample_records import LINEAR, at, filled

from dooly_backend.database import Database, faults
from dooly_backend.errors import DatabaseError

ROOT = Path(__file__).resolve().parent.parent
WAYS = [{"read_only": True}, {}, {"create": True}]


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


# -- a full disk, killed and competing writers: in processes of their own

WRITER = """
import resource, sys
from pathlib import Path
from dooly_backend.database import Database
from dooly_backend.errors import DatabaseError
from dooly_backend.database.records import StepMeasurement
from dooly_backend.workload import Batch
from sample_records import filled, H200, LINEAR, QWEN, at

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
