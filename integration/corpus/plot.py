"""Cumulative new work per model, as a page that a browser opens."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from dooly_backend.profiling.planners import PLANNERS
from integration.corpus.summary import GROUPS, Figures

PLOTLY = "https://cdn.plot.ly/plotly-2.35.2.min.js"
COLOURS = {"attention": "#1f77b4", "linear": "#ff7f0e", "moe": "#2ca02c", "other": "#7f7f7f"}
HEIGHT = 480
LINES = {"Naive": "#d62728", "HF-Diff": "#9467bd", "HF-Model-Diff": "#8c564b"}


def html(found: list[Figures]) -> str:
    """One plot for every corpus."""
    return page([(traces(f), layout(f)) for f in found], "Cumulative new work per model")


def page(charts: Sequence[tuple[list[dict[str, Any]], dict[str, Any]]], title: str) -> str:
    """Plots below each other, each of traces and a layout, as plotly.js takes them."""
    bodies = "\n".join(
        f'<div id="c{i}" style="height:{HEIGHT}px"></div>\n<script>'
        f"Plotly.newPlot('c{i}', {json.dumps(data)}, {json.dumps(layout)});</script>"
        for i, (data, layout) in enumerate(charts)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title>"
        f'<script src="{PLOTLY}"></script></head>\n<body>\n{bodies}\n</body></html>\n'
    )


def png(page: Path, plotly: Path, height: int) -> None:
    """The page as an image beside it, by a headless chromium and a local copy of plotly.js."""
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / page.name
        local.write_text(page.read_text().replace(PLOTLY, plotly.resolve().as_uri()))
        subprocess.run(
            [
                "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--allow-file-access-from-files", f"--window-size=1200,{height}",
                "--virtual-time-budget=8000", f"--screenshot={page.with_suffix('.png').resolve()}",
                local.as_uri(),
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip


def traces(found: Figures) -> list[dict[str, Any]]:
    """Dooly's work as stacked bars by group, the other planners as lines."""
    models = labels(found)
    work = found.new_work()
    bars = [
        {
            "type": "bar",
            "name": f"Dooly, {group}",
            "x": models,
            "y": [round(y, 1) for y in accumulate(by_group[group] for _, by_group in work)],
            "marker": {"color": COLOURS[group]},
        }
        for group in GROUPS
        if any(by_group[group] for _, by_group in work)
    ]
    lines = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": planner,
            "x": models,
            "y": [
                round(y, 1)
                for y in accumulate(
                    sum(item.seconds for item in items)
                    for items in PLANNERS[planner](found.workloads)
                )
            ],
            "line": {"color": colour, "dash": "dash" if planner == "HF-Diff" else "solid"},
        }
        for planner, colour in LINES.items()
    ]
    return [*bars, *lines]


def labels(found: Figures) -> list[str]:
    """The models, with their backends where there are several."""
    several = len({w.backend for w in found.workloads}) > 1
    return [f"{w.model} {w.backend}" if several else w.model for w in found.workloads]


def layout(found: Figures, unit: str = "cumulative seconds (estimate)") -> dict[str, Any]:
    saved = found.saved("Dooly") or 0
    title = (
        f"{found.corpus.title}: {found.signatures} signatures, {found.unique} unique, "
        f"{saved:.0f}% less to measure"
        + (f" (without {', '.join(found.missing)})" if found.missing else "")
    )
    return {
        "title": {"text": title},
        "barmode": "stack",
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "xaxis": {"tickangle": -30, "automargin": True},
        "legend": {"orientation": "v"},
    }
