"""What is read of device and host while something is measured."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from sample_records import H200, store

from dooly_backend.database import Database
from dooly_backend.database.merge import merge
from dooly_backend.database.records import Measurement
from dooly_backend.profiling import watch as module
from dooly_backend.profiling.watch import (
    Conditions,
    CpuWatch,
    GpuWatch,
    Watch,
    WatchedRun,
    parsed,
    watch_for,
)
from dooly_backend.workload import WorkloadPoint


def test_this_host() -> None:
    watch = CpuWatch(threads=1)
    watch.begin()
    stop = time.perf_counter() + 0.2
    while time.perf_counter() < stop:  # own work is not the others'
        pass
    conditions = watch.end()
    if not Path("/proc/stat").exists():
        assert conditions == Conditions()
        return
    assert conditions.others is not None
    assert conditions.others >= 0
    assert (conditions.clock_mhz, conditions.temperature_c) == (None, None)


def test_others_work_is_seen() -> None:
    """Processes that spin beside this one: as many as there are processors, and one more."""
    if not Path("/proc/stat").exists():
        pytest.skip("needs Linux's /proc/stat")
    watch = CpuWatch(threads=1)
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(watch._cpus + 1)]
    try:
        time.sleep(0.3)
        watch.begin()
        time.sleep(1.0)
        conditions = watch.end()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert conditions.others is not None
    assert conditions.others > 0.6 * watch._cpus
    assert conditions.suspicious is not None
    assert conditions.suspicious.startswith("other processes kept")


def written(path: Path, user: int, idle: int) -> None:
    path.write_text(f"cpu  {user} 0 0 {idle} 0 0 0 0 0 0\ncpu0 0 0 0 0\n")


def test_a_calm_host_is_not_suspicious(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    written(stat, 1000, 1000)
    watch = CpuWatch(threads=1, stat=stat)
    watch.begin()
    time.sleep(0.05)
    written(stat, 1000, 1010)
    conditions = watch.end()
    assert (conditions.others, conditions.suspicious) == (0.0, None)
    assert CpuWatch(1, tmp_path / "missing").end() == Conditions()


@pytest.mark.parametrize(("processors", "suspicious"), [(2, True), (4, False)])
def test_half_of_the_processors_are_left_to_the_cores_other_threads(
    tmp_path: Path, processors: int, suspicious: bool
) -> None:
    """One processor's work by others, beside one thread of this process."""
    stat = tmp_path / "stat"
    written(stat, 1000, 1000)
    watch = CpuWatch(threads=1, stat=stat)
    watch._cpus = processors
    watch.begin()
    time.sleep(0.1)
    written(stat, 1010, 1010)  # hundredths of a second
    conditions = watch.end()
    assert conditions.others == pytest.approx(0.95, abs=0.25)
    assert (conditions.suspicious is not None) == suspicious


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1980, 64, 0x0000000000000004\n", (1980.0, 64.0, 4)),
        ("345, 30, 0x1", (345.0, 30.0, 1)),
        ("[N/A], 64, 0x0", None),
        ("", None),
    ],
)
def test_lines_of_nvidia_smi(line: str, expected: tuple[float, float, int] | None) -> None:
    assert parsed(line) == expected


class Read(GpuWatch):
    """A device that answers what it is told to."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def _read(self) -> tuple[float, float, int]:
        return 1755.0, 71.0, self._bits


@pytest.mark.parametrize(
    ("visible", "asked"), [(None, "0"), ("1", "1"), (" 3,1", "3"), ("GPU-8a", "GPU-8a"), ("", "0")]
)
def test_the_device_is_the_one_that_this_process_sees(
    visible: str | None, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver counts all devices of a host, whatever CUDA shows."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    commands: list[list[str]] = []

    def answer(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "1980, 64, 0x0000000000000004\n")

    monkeypatch.setattr(module.subprocess, "run", answer)
    assert watch_for(H200).end().clock_mhz == 1980.0
    assert commands[0][-1] == f"--id={asked}"


def test_heat_is_suspicious_and_a_power_cap_is_not() -> None:
    capped = Read(0x4 | 0x1).end()
    assert (capped.clock_mhz, capped.temperature_c) == (1755.0, 71.0)
    assert (capped.throttled, capped.suspicious) == ({"power cap"}, None)
    hot = Read(0x20 | 0x40 | 0x4).end()
    assert hot.throttled > {"power cap"}
    assert hot.suspicious == (
        "the device was slowed down (hardware thermal slowdown, software thermal slowdown)"
    )


def test_without_a_device_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(module.subprocess, "run", missing)
    assert watch_for(H200).end() == Conditions()


class Told(Watch):
    """A watch that says what it is told to, one after the other."""

    def __init__(self, *suspicions: str | None) -> None:
        self._left = list(suspicions)

    def begin(self) -> None:
        return None

    def end(self) -> Conditions:
        return Conditions(suspicious=self._left.pop(0))


POINT = WorkloadPoint("tokens", num_tokens=1)


def measuring() -> dict[tuple[str, WorkloadPoint], Measurement]:
    return {("a", POINT): Measurement(POINT, (1.0, 2.0))}


def test_what_is_suspicious_is_measured_again_and_marked_if_it_stays_so() -> None:
    run = WatchedRun(Told(None, "hot", None, "hot", "hot"))
    states = [run.measure(measuring) for _ in range(3)]
    assert [state["a", POINT].unstable for state in states if not isinstance(state, str)] == [
        False,
        False,
        True,
    ]
    assert (run.again, len(run.seen)) == (2, 5)


def test_where_everything_is_suspicious_nothing_is_repeated() -> None:
    run = WatchedRun(Told(*["busy"] * 20))
    for _ in range(9):
        found = run.measure(measuring)
        assert not isinstance(found, str)
        assert found["a", POINT].unstable
    assert run.again == 3
    assert len(run.seen) == 12


def test_what_is_measured_again_costs_both_times() -> None:
    def slowly() -> dict[tuple[str, WorkloadPoint], Measurement]:
        time.sleep(0.02)
        return {("a", POINT): Measurement(POINT, (1.0, 2.0), timing_us=5000.0)}

    run = WatchedRun(Told("hot", None, None), about={"sweep": {"name": "gpu"}})
    again = run.measure(slowly)
    once = run.measure(slowly)
    assert not isinstance(again, str)
    assert not isinstance(once, str)
    assert (again["a", POINT].timing_us, once["a", POINT].timing_us) == (10_000.0, 5000.0)
    facts = run.conditions().facts
    assert facts["sweep"] == {"name": "gpu"}
    assert facts["spent_s"]["timing"] == 0.015
    assert facts["spent_s"]["setup"] >= 3 * 0.015


def test_a_reason_for_no_measurement_is_passed_on() -> None:
    run = WatchedRun(Told("hot"))
    assert run.measure(lambda: "no room") == "no room"
    assert run.again == 0


def test_conditions_sum_up_and_come_back(tmp_path: Path) -> None:
    run = WatchedRun(Told(), seen=[Read(0x4).end(), Read(0x0).end(), Conditions(others=0.5)])
    kept = run.conditions()
    assert kept.facts == {
        "captured_steps": 3,
        "measured_again": 0,
        "suspicious": 0,
        "clock_mhz": [1755.0, 1755.0, 1755.0],
        "temperature_c": [71.0, 71.0, 71.0],
        "others_busy_processors": [0.5, 0.5, 0.5],
        "throttled": {"power cap": 1},
    }
    with Database.open(tmp_path / "a.db", create=True) as database:
        ids = store(database, {})
        database.record_run(*ids, kept)
        run.seen.append(Conditions())
        database.record_run(*ids, run.conditions())  # the same run, later
        (found,) = database.runs(*ids)
        assert found.started_at == kept.started_at
        assert found.facts["captured_steps"] == 4
    merge(tmp_path / "b.db", [tmp_path / "a.db"])
    with Database.open(tmp_path / "b.db", read_only=True) as database:
        assert database.runs(1, 1) == [found]
