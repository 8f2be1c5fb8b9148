"""The committed validation of a CPU: recorded live runs are still predicted, without an engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dooly_backend.simulation.run_file import load_run
from dooly_backend.simulation.source import from_database
from dooly_backend.simulation.validation import Validation, compared
from integration.packed import profile_of
from integration.validate import run as benchmark

RESULTS = Path(benchmark.__file__).parent / "results" / "gemma2-small"


@pytest.fixture(scope="module")
def validation() -> Validation:
    """Decode-heavy runs; the step's own cost is that of the runs that were made for it."""
    source = from_database(str(profile_of(RESULTS)), "gemma2-small", None, {})
    live = [load_run(RESULTS / f"decode-heavy-live-{n}.json.xz") for n in range(3)]
    others = [load_run(file) for file in sorted(RESULTS.glob("calibration*-live-*.json.xz"))]
    workload = benchmark.with_plan(RESULTS / "plan.json")["decode-heavy"]
    return compared(workload, live, source.timer(live[0].limits), others)  # type: ignore[arg-type]


def test_the_schedules_of_live_runs_are_repeated(validation: Validation) -> None:
    assert validation.agreements == [100.0] * 3


def test_latencies_of_live_runs_are_predicted(validation: Validation) -> None:
    """Within 5%, throughput 1%, or twice what live runs differ by: here 10% in TTFT."""
    figures = validation.figures()
    assert figures["tpot_mape"] < 5
    assert figures["ttft_mape"] < max(5, figures["ttft_noise"])
    assert figures["throughput_error"] < max(1, 2 * figures["throughput_noise"])
    assert figures["tpot_mape"] < figures["tpot_mape_profile_only"]
    assert figures["ttft_mape_profile_only"] < 5


def test_what_is_missed_is_named() -> None:
    table = pd.DataFrame(
        [
            ("TTFT p50, ms", 6.0, 1.0),
            ("TTFT p90, ms", -6.0, 3.5),
            ("TPOT p50, ms", -4.0, np.nan),
            ("E2E mean, ms", 50.0, 1.0),
            ("output tokens/s", -1.5, 0.7),
        ],
        columns=["", "error, %", "noise, %"],
    )
    assert benchmark.missed(table) == ["TTFT p50, ms (+6.0%)", "output tokens/s (-1.5%)"]
