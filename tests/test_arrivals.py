"""When requests come: by the clock, by the step, in a closed loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from dooly_backend.simulation.arrivals import Feed, as_admitted
from dooly_backend.simulation.compare import schedule_agreement
from dooly_backend.simulation.records import ServingLimits, ServingRequest, StepTime
from dooly_backend.simulation.replay import replayed
from dooly_backend.simulation.run_file import load_run
from dooly_backend.simulation.scheduler import simulate
from dooly_backend.workload import Batch

RECORDED = Path(__file__).resolve().parent.parent / "integration/validate/results/h200-flash_attn"
LIMITS = ServingLimits(4, 64, 256, 100, 16, async_scheduling=False)


class Constant:
    """Every step takes 10 ms."""

    def time(self, batch: Batch) -> StepTime:
        return StepTime(10_000.0)


def request(identity: int, arrival: float, output: int = 3) -> ServingRequest:
    return ServingRequest(identity, arrival, 8, output)


def ids(requests: object) -> list[int]:
    return [r.id for r in requests]  # type: ignore[attr-defined]


def test_by_the_clock_requests_come_in_order_of_arrival() -> None:
    feed = Feed([request(0, 2.0), request(1, 1.0), request(2, 1.0)])
    assert feed.next_s == 1.0
    assert ids(feed.due(0.5, 100)) == []
    assert feed.skip() == 1.0
    assert ids(feed.due(1.0, 100)) == [1, 2]
    assert ids(feed.due(5.0, 0)) == [0]
    assert feed.skip() is None
    assert feed.next_s is None


def test_by_step_requests_come_before_a_call() -> None:
    feed = Feed([request(0, 0), request(1, 3), request(2, 40), request(3, 40)], by_step=True)
    assert feed.next_s is None
    assert ids(feed.due(7.0, 0)) == [0]
    assert feed.next_call == 3
    assert ids(feed.due(7.0, 2)) == []
    (came,) = feed.due(8.5, 3)
    assert (came.id, came.arrival_s) == (1, 8.5)  # it tells when that was
    assert feed.skip() == 0.0  # nothing left to schedule: no need to wait for call 40
    assert ids(feed.due(9.0, 5)) == [2, 3]


def test_a_closed_loop_has_so_many_requests_at_any_time() -> None:
    feed = Feed([request(i, 99.0) for i in range(4)], concurrency=2)
    assert ids(feed.due(0.0, 0)) == [0, 1]
    assert ids(feed.due(1.0, 9)) == []
    feed.finished(1, 1.5)
    (came,) = feed.due(2.0, 10)
    assert (came.id, came.arrival_s) == (2, 1.5)
    feed.finished(0, 3.0)
    feed.finished(2, 3.0)
    assert ids(feed.due(3.0, 11)) == [3]
    assert feed.skip() is None


def test_a_simulated_request_waits_for_its_time_and_its_turn() -> None:
    run = simulate([request(0, 0.0), request(1, 0.005), request(2, 1.0)], LIMITS, Constant())
    first, second, third = run.requests
    assert first.token_s == (0.01, 0.02, 0.03)
    # It came during the first step and is in the second.
    assert (second.scheduled_s, second.admitted) == (0.01, 1)
    # Nothing runs until it comes.
    assert third.scheduled_s == 1.0
    assert third.token_s[0] == 1.01


def test_in_a_closed_loop_a_request_comes_when_another_ends() -> None:
    run = simulate([request(i, 0.0) for i in range(6)], LIMITS, Constant(), concurrency=2)
    arrivals = [r.request.arrival_s for r in run.requests]
    ends = [r.token_s[-1] for r in run.requests]
    assert arrivals == [0.0, 0.0, ends[0], ends[1], ends[2], ends[3]]
    assert max(len(step.scheduled) for step in run.steps) == 2


def test_a_run_replayed_by_step_has_the_same_schedule() -> None:
    requests = [request(i, i * 0.007, 20) for i in range(12)]
    run = simulate(requests, LIMITS, Constant())
    again = simulate(as_admitted(run), LIMITS, Constant(), by_step=True)
    assert [s.scheduled for s in again.steps] == [s.scheduled for s in run.steps]
    assert [r.admitted for r in again.requests] == [r.admitted for r in run.requests]


@pytest.mark.parametrize("path", sorted(RECORDED.glob("live-*.json.xz")), ids=lambda p: p.name)
def test_runs_recorded_on_a_gpu_have_the_schedule_that_we_simulate(path: Path) -> None:
    run = load_run(path)  # vLLM 0.25.1 on an H200 at its defaults
    assert len(run.steps) > 1000
    assert schedule_agreement(run, replayed(run)) == 100.0
