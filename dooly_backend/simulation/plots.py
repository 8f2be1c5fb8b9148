"""Plots of a run as one page that a browser opens without a network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dooly_backend.simulation.metrics import LATENCIES, Metrics

COLOURS = {
    "attention": "#1f77b4",
    "linear": "#ff7f0e",
    "moe": "#2ca02c",
    "collectives": "#9467bd",
    "other": "#7f7f7f",
    "host": "#d62728",
}
MOST_POINTS = 1000  # of one line: more cannot be seen, and make the page slow


def run_page(metrics: Metrics, title: str, parts_us: pd.DataFrame | None = None) -> str:
    """Latency distributions, the batches over time, and where the steps' time goes."""
    figures = [latency_figure({"": metrics}), batches_figure(metrics)]
    if parts_us is not None:
        figures += [parts_figure(parts_us), parts_over_time_figure(metrics, parts_us)]
    return page(figures, title)


def page(figures: Iterable[Any], title: str, plotlyjs: bool | str = True) -> str:
    """Figures below one another; `plotlyjs` as in plotly's `to_html` ("cdn": a small page)."""
    bodies = []
    for index, figure in enumerate(figures):
        script = plotlyjs if index == 0 else False
        bodies.append(figure.to_html(full_html=False, include_plotlyjs=script))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title></head>\n<body>\n"
        + "\n".join(bodies)
        + "\n</body></html>\n"
    )


def latency_figure(runs: Mapping[str, Metrics]) -> Any:
    """Cumulative distributions of every latency; `runs` by the name that the legend shows."""
    from plotly.subplots import make_subplots

    names = [*LATENCIES, "itl"]
    figure = make_subplots(rows=1, cols=len(names), subplot_titles=[n.upper() for n in names])
    palette = ["#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#7f7f7f"]
    for number, (run, metrics) in enumerate(runs.items()):
        for column, name in enumerate(names, start=1):
            values = (
                metrics.gaps_s
                if name == "itl"
                else metrics.requests[LATENCIES[name]].dropna().to_numpy()
            )
            share, at = cumulative(values)
            figure.add_scatter(
                x=at * 1e3,
                y=share,
                name=run or "requests",
                legendgroup=run,
                showlegend=column == 1 and bool(run),
                line={"color": palette[number % len(palette)]},
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text="ms")
    figure.update_yaxes(title_text="share", row=1, col=1)
    figure.update_layout(title="Latencies", height=360)
    return figure


def cumulative(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Shares and the sorted values below which they lie, thinned to what can be seen."""
    ordered = np.sort(values)
    share = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    kept = thinned(len(ordered))
    return share[kept], ordered[kept]


def thinned(length: int) -> npt.NDArray[np.int64]:
    """Indices of at most MOST_POINTS points, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, MOST_POINTS)).astype(np.int64))


def batches_figure(metrics: Metrics) -> Any:
    """What was in the steps, and how long they took, over time."""
    from plotly.subplots import make_subplots

    kept = thinned(len(metrics.steps))
    steps = metrics.steps.iloc[kept]
    figure = make_subplots(
        rows=3, cols=1, shared_xaxes=True, subplot_titles=["requests", "tokens", "step time, ms"]
    )
    prefills = steps["requests"] - steps["decodes"]
    for row, name, values, colour in (
        (1, "decodes", steps["decodes"], "#1f77b4"),
        (1, "prefills", prefills, "#ff7f0e"),
        (2, "decode tokens", steps["decodes"], "#1f77b4"),
        (2, "prefill tokens", steps["prefill_tokens"], "#ff7f0e"),
        (3, "step time", (steps["end_s"] - steps["start_s"]) * 1e3, "#2ca02c"),
    ):
        figure.add_scatter(
            x=steps["start_s"], y=values, name=name, line={"color": colour, "shape": "hv"},
            row=row, col=1,
        )  # fmt: skip
    figure.update_xaxes(title_text="s", row=3, col=1)
    figure.update_layout(title="Batches", height=640)
    return figure


def parts_figure(parts_us: pd.DataFrame) -> Any:
    """Shares of all steps' time by group of operations."""
    from plotly.graph_objects import Figure, Pie

    totals = parts_us.sum()
    pie = Pie(
        labels=list(totals.index),
        values=totals.to_numpy() / 1e6,
        marker={"colors": [COLOURS.get(name, "#bcbd22") for name in totals.index]},
        sort=False,
    )
    return Figure(pie).update_layout(title="Where the steps' time goes, s", height=400)


def parts_over_time_figure(metrics: Metrics, parts_us: pd.DataFrame) -> Any:
    """The same, step by step."""
    from plotly.graph_objects import Figure

    figure = Figure()
    kept = thinned(len(parts_us))
    at = metrics.steps["start_s"].iloc[kept]
    for name in parts_us.columns:
        figure.add_scatter(
            x=at,
            y=parts_us[name].iloc[kept] / 1e3,
            name=name,
            stackgroup="parts",
            line={"width": 0},
            fillcolor=COLOURS.get(name, "#bcbd22"),
        )
    figure.update_xaxes(title_text="s")
    figure.update_yaxes(title_text="ms")
    return figure.update_layout(title="Parts of a step over time", height=400)
