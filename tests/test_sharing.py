"""Several processes share one profile: claims, turns and the device's lock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sample_records import CPU, LINEAR, signature, store

from dooly_backend.database import Database, claims
from dooly_backend.database.check import check_file
from dooly_backend.database.claims import Claims, workers

pytest.importorskip("torch")

from dooly_backend.profiling.device_lock import device_lock, lock_path

ROOT = Path(__file__).resolve().parent.parent

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "latency.db"
    with Database.open(path, create=True) as database:
        store(database, {LINEAR: []}, environment=CPU)
    return path


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Run a script in a process of its own; the device's lock lies in the test's folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started: list[subprocess.Popen[str]] = []

    def run(script: str, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


# -- claims ----------------------------------------------------------------------


def test_what_one_has_claimed_the_other_leaves(path: Path) -> None:
    with Database.open(path) as one, Database.open(path) as other:
        with Claims(one, 1) as first, Claims(other, 1) as second:
            assert first.take(["a", "b"]) == ["a", "b"]
            assert first.take(["a"]) == ["a"]  # it is ours already
            assert second.take(["a", "b", "c"]) == ["c"]
            second.release(["a"])  # not its own
            assert second.take(["a"]) == []
            first.release(["a"])
            assert second.take(["a", "b"]) == ["a"]
            assert workers(one) == 2
        assert workers(one) == 0
    assert check_file(path).ok


def test_environments_are_claimed_apart(path: Path) -> None:
    with Database.open(path) as database:
        other = database.add_environment(CPU.__class__("other", "cpu", "vllm", "1"))
        with Claims(database, 1) as first, Claims(database, other) as second:
            assert first.take(["a"]) == second.take(["a"]) == ["a"]


CLAIMER = """
import sys
from dooly_backend.database import Database
from dooly_backend.database.claims import Claims

with Database.open(sys.argv[1]) as database, Claims(database, 1) as claims:
    print(claims.take(["a", "b"]), flush=True)
    sys.stdin.readline()
"""


def test_a_killed_one_s_claims_are_void_at_once(path: Path, start: Start) -> None:
    process = start(CLAIMER, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "['a', 'b']\n"
    with Database.open(path) as database, Claims(database, 1) as own:
        assert own.take(["a"]) == []
        process.send_signal(signal.SIGKILL)
        while claims.started(process.pid) is not None:  # a zombie from now on
            time.sleep(0.01)
        assert own.take(["a"]) == ["a"]
        assert workers(database) == 1


def test_another_process_of_the_same_number_is_another(path: Path) -> None:
    with Database.open(path) as database:
        abandoned = Claims(database, 1).__enter__()
        abandoned.take(["a"])
        database._connection.execute("UPDATE worker SET started = started - 1")
        with Claims(database, 1) as own:
            assert own.take(["a"]) == ["a"]


def test_a_silent_host_is_given_up_after_a_while(path: Path) -> None:
    def seen(minutes: float) -> None:
        at = datetime.now(UTC) - timedelta(minutes=minutes)
        database._connection.execute(
            "UPDATE worker SET host = 'elsewhere', pid = 1, seen_at = ? WHERE id = 1",
            (at.isoformat(),),
        )

    with Database.open(path) as database:
        far = Claims(database, 1).__enter__()
        far.take(["a"])
        with Claims(database, 1) as own:
            seen(minutes=claims.SILENT_MINUTES - 1)
            assert own.take(["a"]) == []
            seen(minutes=claims.SILENT_MINUTES + 1)
            assert own.take(["a"]) == ["a"]
            assert far.take(["a", "b"]) == ["b"]  # it lives after all, and goes on
            assert workers(database) == 2


# -- the device's lock -----------------------------------------------------------

HOLDER = """
import sys
from dooly_backend.profiling.device_lock import device_lock

with device_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_one_process_at_a_time_has_a_device(start: Start, tmp_path: Path) -> None:
    import tempfile

    tempfile.tempdir = None  # it was looked up before TMPDIR was set
    holder = start(HOLDER, "cuda 1")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    told: list[str] = []

    def waiting() -> None:
        told.append("waiting")
        holder.kill()  # the lock ends with its process

    with device_lock("cuda 0", waiting):
        assert told == []  # another device
    with device_lock("cuda 1", waiting):
        assert told == ["waiting"]
    assert lock_path("cuda 0").parent == tmp_path
    tempfile.tempdir = None


# -- sharing a profile -----------------------------------------------------------

WORKER = """
import json, random, sys, time
from dooly_backend.database import Database
from dooly_backend.profiling.sharing import Sharing
from dooly_backend.workload import Batch, WorkloadPoint
from sample_records import at, signature

signatures = {s.hash: s for s in map(signature, "ABCDE")}
by_batch = {
    Batch.prefill(n): [(h, WorkloadPoint("tokens", num_tokens=n)) for h in signatures]
    for n in range(1, 21)
}
sys.stdin.readline()
measured, elsewhere = [], []
with Database.open(sys.argv[1]) as database, Sharing(database, 1, "the device") as sharing:
    for batch, keys in sharing.turns(by_batch, elsewhere.append):
        for key in keys:
            time.sleep(random.uniform(0, 0.002))
            measured.append([signatures[key[0]].name, key[1].key])
            database.record(signatures[key[0]], 1, at(key[1].key, 1.0))
            print(json.dumps(measured[-1]), flush=True)
    with sharing.once("steps", lambda: bool(database.signatures().get(signature("steps").hash))) as ours:
        if ours:
            database.record(signature("steps"), 1, at("tokens=1", 1.0))
            print(json.dumps(["steps", ""]), flush=True)
print(json.dumps(sum(elsewhere)), flush=True)
"""  # noqa: E501


def test_four_at_once_measure_every_point_once(path: Path, start: Start) -> None:
    processes = [start(WORKER, path) for _ in range(4)]
    outputs = [process.communicate("go\n", timeout=100)[0].splitlines() for process in processes]
    measured = Counter(tuple(json.loads(line)) for lines in outputs for line in lines[:-1])
    assert set(measured.values()) == {1}
    assert len(measured) == 5 * 20 + 1
    for process, lines in zip(processes, outputs, strict=True):
        assert process.returncode == 0
        own = sum('"steps"' not in line for line in lines[:-1])
        assert json.loads(lines[-1]) == 100 - own  # told of all that others did
    assert check_file(path).ok
    with Database.open(path, read_only=True) as database:
        assert workers(database) == 0
        assert len(database.measurements(signature("A").hash, 1)) == 20


def test_killed_ones_leave_their_share_to_the_others(path: Path, start: Start) -> None:
    processes = [start(WORKER, path) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    committed: list[str] = []
    for process in processes[:3]:
        assert process.stdout is not None
        committed.append(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        committed += process.stdout.read().splitlines()
    rest = processes[3].communicate(timeout=100)[0].splitlines()
    assert processes[3].returncode == 0
    # The last line of one that came to its end before it was killed is no point.
    said = map(json.loads, [*committed, *rest])
    measured = Counter(tuple(point) for point in said if isinstance(point, list))
    assert {point: n for point, n in measured.items() if n > 1} == {}
    assert check_file(path).ok
    with Database.open(path, read_only=True) as database:
        counts = {n: len(database.measurements(signature(n).hash, 1)) for n in "ABCDE"}
    assert counts == dict.fromkeys("ABCDE", 20)
