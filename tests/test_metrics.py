"""What a run was like, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dooly_backend.errors import InputError
from dooly_backend.simulation.metrics import Metrics, Spread, busy_s
from dooly_backend.simulation.records import Run, ServingRequest
from tests.run_records import RUN, step


def test_latencies_of_requests() -> None:
    table = Metrics(RUN).requests.set_index("id")
    assert table.loc[0, ["queue_s", "ttft_s", "tpot_s", "e2e_s"]].tolist() == [0, 1, 0.75, 2.5]
    assert table.loc[1, ["queue_s", "ttft_s", "tpot_s", "e2e_s"]].tolist() == [0.5, 1.5, 1, 2.5]


def test_requests_come_in_the_order_of_arrival() -> None:
    turned = Run(RUN.steps, RUN.requests[::-1])
    assert Metrics(turned).requests["id"].tolist() == [0, 1]


def test_composition_of_steps() -> None:
    steps = Metrics(RUN).steps
    assert steps["requests"].tolist() == [1, 2, 2, 1]
    assert steps["decodes"].tolist() == [0, 1, 2, 1]
    assert steps["tokens"].tolist() == [100, 51, 2, 1]
    assert steps["prefill_tokens"].tolist() == [100, 50, 0, 0]
    assert steps["context_tokens"].tolist() == [0, 100, 151, 51]


def test_a_one_token_prompt_is_no_decode() -> None:
    run = Run((step(0, 1, (0, 1, 0)),), RUN.requests)
    assert Metrics(run).steps["decodes"].tolist() == [0]


def test_summary() -> None:
    summary = Metrics(RUN).summary
    assert summary.duration_s == 3.0
    assert summary.output_tokens_per_s == pytest.approx(5 / 3)
    assert summary.total_tokens_per_s == pytest.approx(155 / 3)
    assert summary.utilisation == pytest.approx(2.75 / 3)
    assert summary.preemptions == 1
    assert summary.cached_share == pytest.approx(16 / 150)
    assert summary.extrapolated_share == 0.0
    ttft, itl = summary.latencies["ttft"], summary.latencies["itl"]
    assert ttft is not None
    assert itl is not None
    assert (ttft.mean, ttft.p50) == (1.25, 1.25)
    assert itl.mean == pytest.approx((1.0 + 0.5 + 1.0) / 3)


def test_the_duration_starts_with_the_first_arrival() -> None:
    late = tuple(
        replace(r, request=replace(r.request, arrival_s=r.request.arrival_s + 0.25))
        for r in RUN.requests
    )
    assert Metrics(Run(RUN.steps, late)).summary.duration_s == 2.75


def test_a_request_of_one_token_has_no_tpot() -> None:
    one = replace(RUN.requests[0], token_s=(1.0,))
    metrics = Metrics(Run(RUN.steps, (one,)))
    assert np.isnan(metrics.requests["tpot_s"].iloc[0])
    assert metrics.summary.latencies["tpot"] is None
    assert metrics.summary.latencies["itl"] is None


def test_a_live_run_has_no_predicted_times() -> None:
    live = Run(tuple(replace(s, time=None) for s in RUN.steps), RUN.requests)
    metrics = Metrics(live)
    assert metrics.steps["device_us"].isna().all()
    assert metrics.summary.extrapolated_share is None


def test_pipelined_steps_count_once() -> None:
    overlapping = Run((step(0, 2, (0, 1, 5)), step(1, 3, (1, 1, 5)), step(1, 2, (2, 1, 5))), ())
    steps = Metrics(Run(overlapping.steps, RUN.requests)).steps
    assert busy_s(steps) == 3.0


def test_percentiles_are_numpys() -> None:
    values = np.arange(101, dtype=float)
    assert Spread.of(values) == Spread(50.0, 50.0, 90.0, 99.0)


@pytest.mark.parametrize("run", [Run((), ()), Run(RUN.steps, ())])
def test_a_run_without_requests_is_refused(run: Run) -> None:
    with pytest.raises(InputError, match="finished no request"):
        Metrics(run)


def test_an_unfinished_request_is_named() -> None:
    unfinished = replace(RUN.requests[0], token_s=(), request=ServingRequest(7, 0.0, 5, 5))
    with pytest.raises(InputError, match="request 7"):
        _ = Metrics(Run(RUN.steps, (unfinished,))).requests
