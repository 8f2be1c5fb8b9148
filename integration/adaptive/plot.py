"""Error against the number of points, as a page and, where plotly can draw one, an image."""

from __future__ import annotations

from pathlib import Path

import click
import pandas as pd

COLOURS = ("#1f77b4", "#d62728")


def draw(curve: pd.DataFrame, title: str, page: Path) -> None:
    """One panel for every shape; `curve` is what `run.curves` returns."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    shapes = sorted(set(curve["shape"]) - {"all"}) if len(set(curve["shape"])) > 2 else ["all"]
    figure = make_subplots(rows=1, cols=len(shapes), subplot_titles=shapes)
    for column, shape in enumerate(shapes, 1):
        for colour, sweep in zip(COLOURS, sorted(set(curve["sweep"])), strict=False):
            line = curve[(curve["shape"] == shape) & (curve["sweep"] == sweep)]
            figure.add_trace(
                go.Scatter(
                    x=line["points"], y=100 * line["mean_error"], text=line["part"], name=sweep,
                    mode="lines+markers", line={"color": colour}, showlegend=column == 1,
                ),
                row=1, col=column,
            )  # fmt: skip
    figure.update_xaxes(type="log", title_text="points of a signature")
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="mean error on held-out places, %", col=1)
    figure.update_layout(title=title, width=max(600, 360 * len(shapes)), height=460)
    figure.write_html(page, include_plotlyjs="cdn")
    try:
        figure.write_image(page.with_suffix(".png"))
    except (ImportError, RuntimeError, ValueError) as error:
        click.echo(f"no image: {str(error).splitlines()[0]}", err=True)
