"""What a validation says, with runs whose errors are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dooly_backend.simulation.records import (
    Batches,
    Run,
    ServingLimits,
    StepTime,
    StepTimes,
)
from dooly_backend.simulation.replay import batches, replayed
from dooly_backend.simulation.scheduler import simulate
from dooly_backend.simulation.validation import Validation, at_load, overall, table_rows
from dooly_backend.simulation.workload import Workload
from dooly_backend.workload import Batch

LIMITS = ServingLimits(8, 64, 512, 100, 16, async_scheduling=False)
WORKLOAD = Workload(name="small", requests=12, prompt=40, output=10, rate=20.0)


class Affine:
    """``1000 + 100 * tokens`` microseconds a step, times `factor`."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def time(self, batch: Batch) -> StepTime:
        return StepTime((1000.0 + 100.0 * batch.num_tokens) * self.factor)

    def times(self, many: Batches) -> StepTimes:
        device = (1000.0 + 100.0 * many.total(many.query)) * self.factor
        nothing = np.zeros(len(device))
        return StepTimes(device, nothing, nothing, nothing.astype(bool))


def run(factor: float) -> Run:
    return simulate(WORKLOAD.build(), LIMITS, Affine(factor))


@pytest.fixture(scope="module")
def validation() -> Validation:
    live = [run(1.0), run(1.0)]
    return Validation(WORKLOAD, live, run(1.0), run(1.0), run(0.5), Affine())  # type: ignore[arg-type]


def test_a_perfect_simulation(validation: Validation) -> None:
    figures = validation.figures()
    assert figures["schedule_agreement"] == 100.0
    for name in ("ttft_mape", "tpot_mape", "throughput_error", "ttft_noise", "step_time_mape"):
        assert figures[name] == pytest.approx(0.0, abs=1e-6)
    assert figures["tpot_mape_forward_only"] > 30


def test_rows_for_people(validation: Validation) -> None:
    rows = {row["what"]: row for row in table_rows(validation)}
    assert len(rows) == 16
    assert rows["TTFT p90, ms"]["live"] == pytest.approx(rows["TTFT p90, ms"]["simulated"])
    assert rows["time of a step, ms"]["error"] == pytest.approx(0.0)


def test_step_errors_know_no_schedule(validation: Validation) -> None:
    """A simulation that is twice as slow in all: each step's time alone is off by 100%."""
    slow = replace(validation, timer=Affine(2.0))
    assert slow.figures()["step_time_mape"] == pytest.approx(100.0)
    assert slow.figures()["step_time_bias"] == pytest.approx(100.0)


def test_overall_is_the_mean_and_the_least_agreement(validation: Validation) -> None:
    slow = replace(validation, simulated=run(1.1))
    both = overall([validation, slow])
    assert both["tpot_mape"] == pytest.approx(slow.figures()["tpot_mape"] / 2, rel=1e-3)
    assert both["schedule_agreement"] == 100.0


def test_a_replay_schedules_alike_whatever_the_steps_take() -> None:
    live = run(3.0)
    again = replayed(live)
    assert list(batches(again).query) == list(batches(live).query)
    assert list(batches(again).context) == list(batches(live).context)


def test_a_rate_for_a_load() -> None:
    """Twice as fast an engine gets twice the rate; half the load half of it."""
    rate = at_load(WORKLOAD, 0.8, LIMITS, Affine()).rate
    assert rate is not None
    assert at_load(WORKLOAD, 0.8, LIMITS, Affine(0.5)).rate == pytest.approx(2 * rate, rel=0.01)
    assert at_load(WORKLOAD, 0.4, LIMITS, Affine()).rate == pytest.approx(rate / 2, rel=0.01)
