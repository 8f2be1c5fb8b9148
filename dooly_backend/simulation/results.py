"""A run on disk: tables as Parquet, a summary as JSON, a trace, and a page of plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dooly_backend.simulation.columns import Steps
from dooly_backend.simulation.metrics import Metrics
from dooly_backend.simulation.plots import run_page
from dooly_backend.simulation.records import Run
from dooly_backend.simulation.replay import batches
from dooly_backend.simulation.stages import StageTimer
from dooly_backend.simulation.step_time import StepModel
from dooly_backend.simulation.timeline import trace_events

REQUESTS, STEPS, SUMMARY = "requests.parquet", "steps.parquet", "summary.json"
TRACE, PAGE = "trace.json", "plots.html"


def write_results(
    folder: Path,
    metrics: Metrics,
    about: Mapping[str, Any],
    parts_us: pd.DataFrame | None = None,
) -> list[Path]:
    """Write a run into `folder`, which is made if need be; the files written.

    `about` says what was run and goes into the summary. `parts_us` has one row
    per step and one column per group of operations, microseconds: then the
    steps' table and the plots show where a step's time goes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    requests = metrics.requests.copy()
    tokens = {record.request.id: list(record.token_s) for record in metrics.run.requests}
    requests["token_s"] = requests["id"].map(tokens)
    requests.to_parquet(folder / REQUESTS, index=False)
    steps_table(metrics, parts_us).to_parquet(folder / STEPS, index=False)
    summary = {**about, **metrics.summary.as_dict()}
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2, default=str) + "\n")
    with (folder / TRACE).open("w") as file:
        json.dump(trace_events(metrics.run), file, separators=(",", ":"), allow_nan=False)
    title = str(about.get("model", "run"))
    (folder / PAGE).write_text(run_page(metrics, title, parts_us))
    return [folder / name for name in (REQUESTS, STEPS, SUMMARY, TRACE, PAGE)]


def parts_of_steps(run: Run, timer: StepModel | StageTimer) -> pd.DataFrame:
    """Where every step's time goes, by group of operations: microseconds."""
    return pd.DataFrame(timer.parts_us(batches(run)))


def steps_table(metrics: Metrics, parts_us: pd.DataFrame | None) -> pd.DataFrame:
    """The steps with who was in them: lists `ids`, `query`, `context`, one entry per request.

    Parts of their time are columns like ``part_attention_us``.
    """
    columns = Steps.of(metrics.run.steps)
    lists = {
        name: np.split(values, columns.starts[1:])
        for name, values in (
            ("ids", columns.id),
            ("query", columns.query),
            ("context", columns.context),
        )
    }
    steps = pd.concat([metrics.steps, pd.DataFrame(lists)], axis=1)
    if parts_us is None:
        return steps
    return pd.concat([steps, parts_us.add_prefix("part_").add_suffix("_us")], axis=1)
