"""The virtual clock: vLLM's two step functions, told by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dooly_backend.engines.vllm_scheduler import VirtualClock
from dooly_backend.regression.clock import ClockResponse
from dooly_backend.simulation.records import Run, ServingLimits, ServingRequest, StepTime
from dooly_backend.simulation.scheduler import simulate
from dooly_backend.workload import Batch
from integration.schedules.cases import MadeUpTimer


class Waiting(MadeUpTimer):
    """Of a backend whose launch waits for the device."""

    launches_wait = True


TIMERS = {
    "device": MadeUpTimer(64.0, 32.0),
    "host": MadeUpTimer(4000.0, 32.0),
    "launch": MadeUpTimer(64.0, 32.0, 4000.0),
    "waiting": Waiting(64.0, 32.0, 40.0),
    "warm": MadeUpTimer(64.0, 32.0, clock=ClockResponse(0.7, 0.4, 0.01, 300.0)),
}


def burst(waits: bool, timer: MadeUpTimer) -> Run:
    """Eight requests at once, all as long: no step is empty before the last."""
    limits = ServingLimits(8, 64, 256, 200, 16, async_scheduling=waits)
    requests = [ServingRequest(i, 0.0, 30, 40) for i in range(8)]
    return simulate(requests, limits, timer)


@pytest.mark.parametrize("name", TIMERS)
@pytest.mark.parametrize("waits", [True, False])
def test_the_fast_clock_is_that_of_the_engines_loop(name: str, waits: bool) -> None:
    run = burst(waits, TIMERS[name])
    clock = VirtualClock(TIMERS[name], TIMERS[name].clock)
    outputs = [output(step.scheduled) for step in run.steps]
    found = []
    for index in range(len(outputs) + waits):
        if index < len(outputs):
            start = clock.now()
            clock.scheduled(outputs[index])
            found.append([start, clock.now()])
        taken = index - waits  # asynchronous: the result of the step before
        if taken >= 0:
            clock.awaited(outputs[taken])
            found[taken].append(clock.now())
            clock.noted(outputs[taken])
            found[taken].append(clock.now())
    assert found == [[s.start_s, s.launched_s, s.ready_s, s.end_s] for s in run.steps]


def output(scheduled: object) -> SimpleNamespace:
    """The parts of vLLM's SchedulerOutput that the clock reads."""
    parts = list(scheduled)  # type: ignore[call-overload]
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[str(p.id) for p in parts], num_computed_tokens=[p.context for p in parts]
        ),
        num_scheduled_tokens={str(p.id): p.query for p in parts},
    )


class Fixed:
    """Every step takes the same."""

    def __init__(self, time: StepTime, launches_wait: bool = False) -> None:
        self._time = time
        self.launches_wait = launches_wait

    def time(self, batch: Batch) -> StepTime:
        return self._time


def ends_ms(waits: bool, time: StepTime, launches_wait: bool = False) -> list[float]:
    limits = ServingLimits(1, 64, 256, 200, 16, async_scheduling=waits)
    run = simulate([ServingRequest(0, 0.0, 8, 4)], limits, Fixed(time, launches_wait))
    return [round(1e3 * step.end_s, 6) for step in run.steps]


def test_synchronous_steps_add_up() -> None:
    assert ends_ms(False, StepTime(5000.0, 2000.0, 1000.0)) == [8.0, 16.0, 24.0, 32.0]


def test_asynchronous_steps_hide_the_host_behind_the_device() -> None:
    # Host 2, device 5, output 1: a result each 5 ms, once the first is out.
    assert ends_ms(True, StepTime(5000.0, 2000.0, 1000.0)) == [8.0, 13.0, 18.0, 23.0]


def test_asynchronous_steps_show_a_host_slower_than_the_device() -> None:
    # Host 5, device 2, output 1: a result each 6 ms; the last waits for the device alone.
    assert ends_ms(True, StepTime(2000.0, 5000.0, 1000.0)) == [11.0, 17.0, 23.0, 25.0]


def test_the_device_is_not_done_before_the_host_has_launched() -> None:
    assert ends_ms(False, StepTime(2000.0, 1000.0, launch_us=3000.0)) == [4.0, 8.0, 12.0, 16.0]
    assert ends_ms(False, StepTime(5000.0, 1000.0, launch_us=3000.0)) == [6.0, 12.0, 18.0, 24.0]


def test_a_launch_that_waits_for_the_device_delays_the_tokens_before_it() -> None:
    time = StepTime(5000.0, 1000.0, launch_us=3000.0)
    assert ends_ms(True, time) == [8.0, 12.0, 16.0, 21.0]
    # Each step's tokens come with the end of the next launch, 3 ms after they were ready.
    assert ends_ms(True, time, launches_wait=True) == [9.0, 14.0, 19.0, 21.0]
    assert ends_ms(False, time, launches_wait=True) == ends_ms(False, time)


def test_a_warm_device_needs_longer_and_recovers() -> None:
    """Prefills of 12 tokens in a row, then one after a rest; the times are kept as they were."""
    response = ClockResponse(cool=0.75, slope=0.5, tau_s=0.002)
    timer = MadeUpTimer(0.0, 0.0, clock=response)
    limits = ServingLimits(1, 12, 256, 200, 16, async_scheduling=False)
    requests = [ServingRequest(0, 0.0, 120, 1), ServingRequest(1, 1.0, 12, 1)]
    run = simulate(requests, limits, timer)
    took = [step.time.device_us for step in run.steps if step.time is not None]
    stream = [timer.time(Batch.prefill(12, 12 * i)).device_us for i in range(10)]
    shares = [us / steady for us, steady in zip(took[:10], stream, strict=True)]
    assert shares == sorted(shares)
    assert 0.75 < shares[0] < 0.9
    assert shares[-1] == 1.0
    assert took[10] / timer.time(Batch.prefill(12)).device_us == pytest.approx(shares[0], rel=1e-9)
    for step in run.steps:
        assert step.time is not None
        parts = step.time.host_us + step.time.device_us + step.time.output_us
        assert (step.end_s - step.start_s) * 1e6 == pytest.approx(parts)
