"""Recorded live runs beside Vidur's times (integration/vidur/served.py), and their page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dooly_backend.simulation.metrics import Metrics
from dooly_backend.simulation.records import Run
from dooly_backend.simulation.run_file import load_run
from integration.accuracy import requests
from integration.accuracy.refresh import ROOT
from integration.vidur.run import VidurResult
from integration.vidur.served import compared

RUN = ROOT / "integration/validate/results/h200-flash_attn-2/live-0.json.xz"


@pytest.fixture(scope="module")
def live() -> Run:
    return load_run(RUN)


def as_vidur_counts(live: Run, longer: float) -> VidurResult:
    """The run's own times, all of them `longer` times as long, in Vidur's columns."""
    table = Metrics(live).requests
    tokens = table["output_tokens"]
    normalized = table["tpot_s"].fillna(0.0) * longer * (tokens - 1) / tokens
    return VidurResult(
        tuple(table["ttft_s"] * longer), tuple(normalized), tuple(tokens), "pypi", "a/model"
    )


@pytest.mark.parametrize("longer", [1.0, 1.1])
def test_a_run_is_as_far_from_itself_as_it_was_made(live: Run, longer: float) -> None:
    found = compared([live, live], as_vidur_counts(live, longer))
    percent = 100 * (longer - 1)
    for latency in ("ttft", "tpot"):
        assert found[f"{latency}_mape"] == pytest.approx(percent, abs=0.01)
        assert found[f"{latency}_noise"] == 0.0
        assert found[latency]["p90"]["error"] == pytest.approx(percent, abs=0.01)
    assert compared([live], as_vidur_counts(live, longer))["ttft_noise"] is None


def test_the_page_has_it_beside_doolysim(live: Run, tmp_path: Path) -> None:
    assert requests.in_vidur(tmp_path) == ["Not measured yet."]
    known = tmp_path / "integration/validate/results/h200-b"
    known.mkdir(parents=True)
    figures = {"ttft_mape": 2.0, "tpot_mape": 1.0, "ttft_noise": None, "tpot_noise": 0.5}
    simulated = {"workloads": {"w": figures}}
    (known / "figures.json").write_text(json.dumps(simulated))
    run = {"model": "a/Some-8B", "backend": "B", "execution_mode": "full_graph", "device": "NVIDIA"}
    run |= {"runs": "h200-b", "workloads": {"w": {}}}
    run["workloads"]["w"]["whole steps"] = compared([live], as_vidur_counts(live, 1.1))
    run["workloads"]["w"]["sum of operations"] = {"stopped": "Vidur failed: AssertionError"}
    results = tmp_path / "integration/vidur/results"
    results.mkdir(parents=True)
    (results / "served-b.json").write_text(json.dumps(run))
    rows = [line for line in requests.in_vidur(tmp_path) if line.startswith("| Some-8B")]
    cells = [cell.strip() for cell in rows[0].split("|")[1:-1]]
    assert cells[:2] == ["Some-8B, B, NVIDIA", "w"]
    assert cells[2:] == ["10.0 %", "-", "2.0 %", "10.0 %", "-", "1.0 %", "-, 0.5 %"]
