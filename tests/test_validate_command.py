"""`dooly validate`: live vLLM beside its simulation, on a few small requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from sample_records import CPU, H200

from dooly_backend.errors import InputError
from dooly_backend.validate_command import profiled_threads
from tests.conftest import ROOT, Profiled


@pytest.mark.engine
@pytest.mark.usefixtures("needs_engine")
def test_live_and_simulated_in_one_run(profiled: Profiled, tmp_path: Path) -> None:
    """Nothing is profiled anew; steps are scheduled as live, and the tables are whole."""
    workload = "fixed:requests=6,prompt=48,output=6,rate=8"
    done = subprocess.run(
        [
            sys.executable, "-m", "dooly_backend.cli", "validate", "smollm-135m", "--json",
            "--db", str(profiled.path), "--threads", "1", "--runs", "2", "--sweep", "smoke",
            "--workload", workload, "--max-num-batched-tokens", "64", "--max-model-len", "512",
            "--calibration", "2", "-o", str(tmp_path / "out"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["schedule_agreement"] == 100.0
    for name in ("ttft_mape", "tpot_mape", "throughput_error", "ttft_noise"):
        assert found[name] >= 0
    table = pd.read_csv(tmp_path / "out" / "comparison.csv")
    assert len(table) == 3 * 4 + 1 + 3
    assert (table["error"] != table["profile_only"]).any()
    assert (table["live"] > 0).all()
    assert (table["simulated"] > 0).all()
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert figures["limits"]["max_num_batched_tokens"] == 64
    assert len(list((tmp_path / "out").glob("*-live-*.json.xz"))) == 2


def test_the_live_engine_has_the_threads_of_the_profile() -> None:
    assert profiled_threads(CPU, None) == profiled_threads(CPU, 2) == 2
    assert profiled_threads(H200, 3) == 3
    with pytest.raises(InputError, match="measured with 2 threads, not 1: leave --threads out"):
        profiled_threads(CPU, 1)
