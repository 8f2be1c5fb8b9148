"""Recorded live runs beside Vidur, which reads an export and no live run.

    python -m integration.vidur.served meta-llama/Llama-3.1-8B \
        integration/validate/results/h200-flash_attn-2/live-*.json.xz \
        --backend FLASH_ATTN -o integration/vidur/results/served-flash_attn.json

Exports the model, once as exports are (whole steps) and once with the sum of the operations alone,
as they were until 2026-12-07, and has Vidur serve the very requests of the runs, as they came.
Errors are those of `dooly validate`: the mean over mean, P50, P90 and P99, each against the mean of
a workload's runs. Needs Vidur (0.0.26 from PyPI) in this Python, and neither engine nor GPU; three
minutes. That release stops with an AssertionError where its KV cache is full and it restarts a
request (`Request.restart` leaves the stage's tokens as they were): such a workload has the error.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from dooly_backend.database import Database
from dooly_backend.errors import InputError
from dooly_backend.exporters import get_exporter
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.simulation.compare import STATISTICS, errors
from dooly_backend.simulation.metrics import Metrics, Spread
from dooly_backend.simulation.records import Run
from dooly_backend.simulation.run_file import load_run
from integration.vidur.run import VidurResult, replay


@click.command()
@click.argument("model")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--db", default="builtin:h200", show_default=True)
@click.option("--backend")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
def main(model: str, files: tuple[Path, ...], db: str, backend: str | None, out: Path) -> None:
    """Compare FILES, grouped by workload, with Vidur's simulations of MODEL."""
    runs: dict[str, list[Run]] = defaultdict(list)
    for file in files:
        run = load_run(file)
        runs[str(run.about.get("workload", file.name))].append(run)
    with Database.open(db, read_only=True) as database:
        whole = LatencyModel.load(database, model, backend=backend)
    found: dict[str, Any] = {
        "model": whole.configuration.model,
        "backend": whole.configuration.backend,
        "execution_mode": whole.configuration.execution_mode,
        "device": whole.environment.device,
        "runs": files[0].resolve().parent.name,
        "workloads": defaultdict(dict),
    }
    exported = {"whole steps": whole, "sum of operations": replace(whole, stream_cost=())}
    for name, latencies in exported.items():
        with tempfile.TemporaryDirectory() as folder:
            export = Path(folder) / "export"
            get_exporter("vidur").export([latencies], export, {"layout": "pypi"})
            for workload, live in runs.items():
                assert live[0].limits is not None
                blocks = live[0].limits.num_gpu_blocks
                requests = [record.request for record in live[0].requests]
                try:
                    compared_here = compared(live, replay(export, requests, blocks))
                except InputError as error:  # it stops where it has to restart a request
                    compared_here = {"stopped": str(error)}
                found["workloads"][workload][name] = compared_here
                click.echo(f"{workload}, {name}: {told(compared_here)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=2) + "\n")


def compared(live: Sequence[Run], served: VidurResult) -> dict[str, Any]:
    """By latency and statistic: live and simulated seconds, errors in percent; their MAPE."""
    metrics = [Metrics(run) for run in live]
    found: dict[str, Any] = {}
    for latency, values in (("ttft", served.ttft_s), ("tpot", served.tpot_s)):
        truth = [each.summary.latencies[latency] for each in metrics]
        simulated = asdict(Spread.of(np.array(values)))
        rows = {
            name: errors([getattr(each, name) for each in truth], simulated[name])
            for name in STATISTICS
        }
        found[latency] = {name: _rounded(row) for name, row in rows.items()}
        wrong, noise = ([row[name] for row in rows.values()] for name in ("error", "noise"))
        found[f"{latency}_mape"] = round(float(np.mean(np.abs(wrong))), 2)
        several = len(live) > 1
        found[f"{latency}_noise"] = round(float(np.mean(noise)), 2) if several else None
    return found


def _rounded(row: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if np.isnan(value) else round(value, 6) for name, value in row.items()}


def told(found: Mapping[str, Any]) -> str:
    if "stopped" in found:
        return str(found["stopped"])
    return f"TTFT {found['ttft_mape']:.1f} %, TPOT {found['tpot_mape']:.1f} %"


if __name__ == "__main__":
    main()
