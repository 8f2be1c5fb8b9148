"""The committed validation of a CPU: recorded live runs are still predicted, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dooly_backend.simulation.run_file import load_run
from dooly_backend.simulation.source import from_database
from dooly_backend.simulation.validation import Validation, compared
from integration.validate import run as benchmark

RESULTS = Path(benchmark.__file__).parent / "results" / "smollm-135m"


@pytest.fixture(scope="module")
def validation() -> Validation:
    """Decode-heavy runs; the step's own cost is that of the balanced ones."""
    source = from_database(str(RESULTS / "profile.db"), "SmolLM-135M", None, {})
    live = [load_run(RESULTS / f"decode-heavy-live-{n}.json.xz") for n in range(2)]
    others = [load_run(RESULTS / f"balanced-live-{n}.json.xz") for n in range(2)]
    workload = benchmark.with_plan(RESULTS / "plan.json")["decode-heavy"]
    return compared(workload, live, source.timer(live[0].limits), others)  # type: ignore[arg-type]


def test_the_schedules_of_live_runs_are_repeated(validation: Validation) -> None:
    assert validation.agreements == [100.0, 100.0]


def test_latencies_of_live_runs_are_predicted(validation: Validation) -> None:
    """What is asked is what two live runs of a shared host differ by, twice."""
    figures = validation.figures()
    assert figures["tpot_mape"] < 8
    assert figures["ttft_mape"] < 12
    assert figures["throughput_error"] < 4
    assert figures["tpot_mape"] < figures["tpot_mape_profile_only"]
