"""The timers and the state of the process while they measure."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from dooly_backend.profiling import timer as timer_module
from dooly_backend.profiling.measure import spread
from dooly_backend.profiling.timer import (
    CpuTimer,
    Sample,
    last_level_cache,
    quiet_process,
    timer_for,
    undisturbed,
    wall_time,
)


@pytest.fixture(scope="module")
def timer() -> CpuTimer:
    return CpuTimer(cache_bytes=1 << 25)


def test_what_is_timed_is_the_call(timer: CpuTimer) -> None:
    assert 3000 <= min(timer.time(lambda: time.sleep(0.003)).us for _ in range(3)) < 300_000
    assert 0 <= min(timer.time(lambda: None).us for _ in range(20)) < 1000


def test_the_call_runs_once(timer: CpuTimer) -> None:
    calls: list[int] = []
    timer.time(lambda: calls.append(1))
    assert calls == [1]


def test_an_exception_passes_through(timer: CpuTimer) -> None:
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        timer.time(fails)


def test_a_preempted_call_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts how often a thread of the process lost its processor unwillingly."""
    counts = iter([5, 5, 5, 6])
    monkeypatch.setattr(timer_module, "_preemptions", lambda: next(counts))
    assert not wall_time(lambda: None).disturbed
    assert wall_time(lambda: None).disturbed


def test_preemptions_are_counted() -> None:
    """Giving the processor up is no preemption."""
    before = timer_module._preemptions()
    assert before >= 0
    assert any(not wall_time(lambda: time.sleep(0.001)).disturbed for _ in range(50))
    assert timer_module._preemptions() >= before


@pytest.mark.parametrize(
    ("disturbed", "expected"),
    [
        ([], (0.0, 1.0, 2.0, 3.0, 4.0)),
        ([1, 3], (0.0, 2.0, 4.0)),
        ([1, 3, 4], (0.0, 1.0, 2.0, 3.0, 4.0)),  # two are too few
    ],
)
def test_disturbed_samples_are_left_out(disturbed: list[int], expected: tuple[float, ...]) -> None:
    assert undisturbed([Sample(float(i), i in disturbed) for i in range(5)]) == expected


def test_flushing_reads_more_than_the_cache(timer: CpuTimer) -> None:
    """It must not write: dirty lines are written back while the next call is timed."""
    buffer = timer._buffer
    assert buffer.numel() * buffer.element_size() >= 2 << 25
    version = buffer._version
    timer.flush()
    assert buffer._version == version


def test_flushing_takes_a_cache_of_unknown_size_seriously() -> None:
    buffer = CpuTimer(cache_bytes=1)._buffer
    assert buffer.numel() * buffer.element_size() >= 1 << 24
    whole = CpuTimer()._buffer
    assert whole.numel() * whole.element_size() >= 2 * last_level_cache() - 8


def test_the_last_level_cache() -> None:
    assert 1 << 16 <= last_level_cache() <= 1 << 33


def test_timers_by_device() -> None:
    engine: Any = SimpleNamespace(environment=SimpleNamespace(device_kind="cpu"))
    assert isinstance(timer_for(engine), CpuTimer)


@pytest.fixture
def collecting() -> Iterator[None]:
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.usefixtures("collecting")
def test_no_garbage_is_collected_meanwhile(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with contextlib.suppress(KeyError), quiet_process():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        raise KeyError
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([5.0, 5.0, 5.0], 1.0),
        ([1.0, 1.0, 2.0, 2.0, 2.0], 2.0),
        ([10.0, 10.0, 10.0, 10.0, 900.0], 1.0),  # one burst
        ([0.0, 0.0, 0.0], 1.0),
        ([7.0], 1.0),
    ],
)
def test_spread(samples: list[float], expected: float) -> None:
    assert spread(samples) == pytest.approx(expected)


def test_a_busy_host_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch):
    timer = CpuTimer(1 << 20)
    assert timer.is_calm
    monkeypatch.setattr(timer_module, "wall_time", lambda call: Sample(1.0, disturbed=True))
    for _ in range(48):
        timer.time(lambda: None)
    assert not timer.is_calm
    monkeypatch.setattr(timer_module, "wall_time", lambda call: Sample(1.0))
    for _ in range(48):
        timer.time(lambda: None)
    assert timer.is_calm
