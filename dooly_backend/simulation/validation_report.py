"""A validation on disk: the tables as CSV, the runs, and a page of plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from dooly_backend.simulation.metrics import Metrics
from dooly_backend.simulation.plots import latency_figure, page
from dooly_backend.simulation.run_file import save_run
from dooly_backend.simulation.validation import Validation, overall, table_rows

_MOST_POINTS = 1000


def write_validation(
    folder: Path,
    validations: Sequence[Validation],
    about: Mapping[str, Any],
    plotlyjs: bool | str = True,
) -> None:
    """Write tables, figures, plots and every run into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"workload": v.name, **row} for v in validations for row in table_rows(v)]
    pd.DataFrame(rows).round(4).to_csv(folder / "comparison.csv", index=False)
    figures = {
        **about,
        **overall(validations),
        "workloads": {v.name: v.figures() for v in validations},
        "limits": None if (limits := validations[0].live[0].limits) is None else vars(limits),
        "served": dict(validations[0].live[0].about),
    }
    text = json.dumps(figures, indent=2, default=str)
    (folder / "figures.json").write_text(text + "\n")
    plots = [figure for v in validations for figure in _figures(v)]
    title = f"{about.get('model')}: live and simulated"
    (folder / "plots.html").write_text(page(plots, title, plotlyjs))
    for validation in validations:
        name = validation.workload.name
        for number, run in enumerate(validation.live):
            save_run(run, folder / f"{name}-live-{number}.json.xz")
        save_run(validation.simulated, folder / f"{name}-simulated.json.xz")


def _figures(validation: Validation) -> list[Any]:
    runs = {f"live {n + 1}": m for n, m in enumerate(validation.comparison.live)}
    latencies = latency_figure({**runs, "simulated": Metrics(validation.simulated)})
    latencies.update_layout(title=f"{validation.name}: latencies")
    return [latencies, _steps_figure(validation)]


def _steps_figure(validation: Validation) -> Any:
    """Every live step beside what is predicted for its batch."""
    from plotly.graph_objects import Figure

    figure = Figure()
    steps = validation.steps
    for kind, group in steps.groupby("kind"):
        shown = group.iloc[:: -(-len(group) // _MOST_POINTS)]
        figure.add_scatter(
            x=shown["live_ms"].round(3),
            y=shown["predicted_ms"].round(3),
            mode="markers",
            marker={"size": 4, "opacity": 0.5},
            name=str(kind),
        )
    most = float(steps["live_ms"].max())
    figure.add_scatter(x=[0, most], y=[0, most], mode="lines", name="equal", line={"dash": "dot"})
    figure.update_xaxes(title_text="live step, ms")
    figure.update_yaxes(title_text="predicted, ms")
    return figure.update_layout(title=f"{validation.name}: steps", height=480)
