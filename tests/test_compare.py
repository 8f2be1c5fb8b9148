"""Live against simulated, with errors that were put in by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dooly_backend.errors import InputError
from dooly_backend.simulation.compare import (
    Comparison,
    between,
    first_difference,
    schedule_agreement,
    step_errors,
)
from dooly_backend.simulation.metrics import Metrics
from dooly_backend.simulation.records import Run, ScheduledRequest
from tests.run_records import RUN


def slower(factor: float) -> Metrics:
    """RUN with every time `factor` times as late; arrivals at 0, so that latencies scale."""

    def later(run: Run) -> Run:
        return Run(
            tuple(
                replace(s, start_s=s.start_s * factor, end_s=s.end_s * factor) for s in run.steps
            ),
            tuple(
                replace(
                    r,
                    request=replace(r.request, arrival_s=0.0),
                    scheduled_s=r.scheduled_s * factor,
                    token_s=tuple(t * factor for t in r.token_s),
                )
                for r in run.requests
            ),
        )

    return Metrics(later(RUN))


def test_errors_of_every_statistic() -> None:
    found = Comparison([slower(1.0)], slower(1.1))
    assert found.latencies["error"].to_numpy() == pytest.approx(10.0)
    assert found.mape("ttft") == pytest.approx(10.0)
    assert found.mape_of_requests("tpot") == pytest.approx(10.0)
    assert found.throughput["error"] == pytest.approx(-100 / 11)
    assert found.steps.loc["milliseconds", "mape"] == pytest.approx(10.0)
    assert found.steps.loc["tokens", "mape"] == 0.0


def test_the_truth_is_the_mean_of_the_live_runs() -> None:
    found = Comparison([slower(0.9), slower(1.1)], slower(1.0))
    assert found.mape("ttft") == pytest.approx(0.0, abs=1e-9)
    assert found.mape_of_requests("ttft") == pytest.approx(0.0, abs=1e-9)
    assert found.noise("ttft") == pytest.approx(20.0)
    assert found.noise_of_requests("ttft") == pytest.approx(20.0)


def test_one_live_run_has_no_noise_floor() -> None:
    found = Comparison([slower(1.0)], slower(1.0))
    assert np.isnan(found.noise("tpot"))
    assert np.isnan(found.throughput["noise"])


def test_noise_does_not_depend_on_which_run_is_first() -> None:
    assert between(1.0, 1.5) == between(1.5, 1.0) == pytest.approx(40.0)


def test_different_requests_are_no_comparison() -> None:
    with pytest.raises(InputError, match="different requests"):
        Comparison([Metrics(Run(RUN.steps, RUN.requests[:1]))], slower(1.0))
    with pytest.raises(InputError, match="live run"):
        Comparison([], slower(1.0))


# -- schedules ------------------------------------------------------------------


def with_step(index: int, **changes: object) -> Run:
    steps = list(RUN.steps)
    steps[index] = replace(steps[index], **changes)  # type: ignore[arg-type]
    return Run(tuple(steps), RUN.requests)


def test_equal_schedules_whatever_the_times_and_the_order() -> None:
    other = with_step(1, end_s=9.0, scheduled=RUN.steps[1].scheduled[::-1])
    assert schedule_agreement(RUN, other) == 100.0
    assert first_difference(RUN, other) is None


@pytest.mark.parametrize(
    "other",
    [
        with_step(2, scheduled=(ScheduledRequest(0, 1, 101),)),
        with_step(2, scheduled=(ScheduledRequest(0, 1, 101), ScheduledRequest(1, 1, 49))),
        with_step(2, preempted=(1,)),
    ],
)
def test_a_step_that_differs(other: Run) -> None:
    assert schedule_agreement(RUN, other) == 75.0
    assert first_difference(RUN, other) == 2


def test_a_step_too_few() -> None:
    shorter = Run(RUN.steps[:3], RUN.requests)
    assert schedule_agreement(RUN, shorter) == schedule_agreement(shorter, RUN) == 75.0
    assert first_difference(shorter, RUN) == 3


def test_errors_of_step_times_alone() -> None:
    table = step_errors(RUN.steps, np.array([1.1e6, 0.9e6, 0.5e6, 0.25e6]))
    assert table["error"].tolist() == pytest.approx([10.0, -10.0, 0.0, 0.0])
    assert table["kind"].tolist() == ["prefill", "prefill", "decode", "decode"]
