"""Samples of a GPU hold kernels only: a host and a device with clocks of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from dooly_backend.profiling.cuda_timer import CudaTimer
from dooly_backend.profiling.timer import Sample

Kernels = Callable[[], None]


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at_us = 0.0

    def record(self) -> None:
        self.at_us = self._device.run(launch_us=1.0, us=self._device.event_us)

    def query(self) -> bool:
        return self.at_us <= self._device.host_us

    def synchronize(self) -> None:
        self._device.host_us = max(self._device.host_us, self.at_us)

    def elapsed_time(self, end: Event) -> float:
        return (end.at_us - self.at_us) / 1000


class Device:
    """A host that launches and one stream that runs what was launched, in order."""

    def __init__(self) -> None:
        self.host_us = 0.0
        self.free_us = 0.0
        self.slept: list[float] = []
        self.event_us = 0.0
        self.gap_us = 0.0  # before every kernel

    def run(self, launch_us: float, us: float) -> float:
        """Launch a kernel; when it ends."""
        self.host_us += launch_us
        self.free_us = max(self.free_us, self.host_us) + us
        return self.free_us

    def now_us(self) -> float:
        return self.host_us

    def event(self) -> Event:
        return Event(self)

    def sleep(self, us: float) -> None:
        self.slept.append(us)
        self.run(3.0, us)

    def flush(self) -> None:
        self.run(5.0, 100.0)

    def small(self) -> None:
        self.run(5.0, self.gap_us + 1.5)

    def synchronize(self) -> None:
        self.host_us = max(self.host_us, self.free_us)

    def kernels(self, count: int, launch_us: float, us: float) -> Kernels:
        def call() -> None:
            for _ in range(count):
                self.run(launch_us, self.gap_us + us)

        return call


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def timer(device: Device) -> CudaTimer:
    timer = CudaTimer(device)  # type: ignore[arg-type]
    device.slept.clear()
    return timer


def truth(sample: Sample, us: float) -> bool:
    return not sample.disturbed and sample.us == pytest.approx(us)


def test_a_short_call_is_hidden_behind_a_short_sleep(timer: CudaTimer, device: Device) -> None:
    call = device.kernels(4, launch_us=10, us=3)
    assert truth(timer.time(call), 12)
    assert device.slept == [1000]


def test_sums_of_calls_are_what_a_stream_of_them_takes() -> None:
    """The events' own time is taken off; the rest between two kernels is part of a step."""
    device = Device()
    device.event_us, device.gap_us = 0.6, 0.8
    timer = CudaTimer(device)  # type: ignore[arg-type]
    calls = [device.kernels(count, launch_us=10, us=3) for count in (1, 2, 5)]
    stream = 8 * (3 + 0.8)
    assert sum(timer.time(call).us for call in calls) == pytest.approx(stream)
    assert timer.empty_us == pytest.approx(0.6)


def test_a_call_that_takes_long_to_launch_is_seen_and_then_hidden(
    timer: CudaTimer, device: Device
) -> None:
    call = device.kernels(100, launch_us=30, us=2)  # 3 ms to launch, 0.2 ms to run
    first = timer.time(call)
    assert first.disturbed
    assert first.exposed
    assert first.us > 1500
    assert truth(timer.time(call), 200)
    assert device.slept[1] > 3000


def test_work_ahead_that_ended_while_other_calls_were_launched_hides_nothing(
    timer: CudaTimer, device: Device
) -> None:
    """Attention behind a mixture-of-experts layer that the host launched for 6 ms."""
    attention = device.kernels(4, launch_us=50, us=3)

    def sample() -> Sample:
        device.kernels(5, launch_us=10, us=1000)()  # the 5 ms of work ahead
        device.kernels(200, launch_us=30, us=1)()  # the predecessor
        return timer.time(attention, ahead_us=5000)

    assert sample().exposed
    assert not device.slept
    assert truth(sample(), 12)
    assert len(device.slept) == 1


def test_work_ahead_that_lasts_needs_no_sleep(timer: CudaTimer, device: Device) -> None:
    call = device.kernels(4, launch_us=50, us=3)
    for _ in range(3):
        device.kernels(5, launch_us=10, us=1000)()
        assert truth(timer.time(call, ahead_us=5000), 12)
    assert not device.slept


def test_a_call_sleeps_behind_work_no_longer_than_it_must(timer: CudaTimer, device: Device) -> None:
    """A sleeping device's clock recovers: one hiccup must not cost every later sample."""
    call = device.kernels(4, launch_us=50, us=3)
    device.host_us += 1
    device.synchronize()
    assert timer.time(call, ahead_us=5000).exposed
    for _ in range(20):
        device.kernels(5, launch_us=10, us=1000)()
        assert truth(timer.time(call, ahead_us=5000), 12)
    assert len(device.slept) == 8


def test_what_was_compiled_once_is_forgotten(timer: CudaTimer, device: Device) -> None:
    slow = [80_000.0]

    def call() -> None:
        device.run(slow.pop() if slow else 10.0, 5.0)

    assert timer.time(call).exposed
    assert truth(timer.time(call), 5)
    assert device.slept[-1] == 100_000  # the longest
    for _ in range(10):
        assert truth(timer.time(call), 5)
    assert device.slept[-1] == 1000


def test_a_call_that_waits_for_its_device_stays_exposed(timer: CudaTimer, device: Device) -> None:
    def call() -> None:
        device.run(10, 5)
        device.synchronize()
        device.run(10, 5)

    assert all(timer.time(call).exposed for _ in range(5))


def test_how_often_a_call_runs_to_heat_the_device_counts_no_launches(
    timer: CudaTimer, device: Device
) -> None:
    """Timed with its launches, the heaviest call would be run too rarely."""
    assert timer.repeats_until_hot(device.kernels(100, launch_us=50, us=5)) == 10
    assert timer.repeats_until_hot(device.kernels(1, launch_us=10, us=1000)) == 5
