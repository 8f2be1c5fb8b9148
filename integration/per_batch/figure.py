"""Figure 1 of the paper: times by length, measured and predicted, with the inversions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from integration.per_batch.batches import Series
from integration.per_batch.inversions import Curves, Time, inversions

_COLOURS = (
    "#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#17becf",
)  # fmt: skip
_LENGTHS = 3  # fewer make no curve


def draw(
    live: Mapping[Series, Curves[str]], predicted: Mapping[Series, Curves[str]], page: Path
) -> None:
    """A row of two panels for every series: measured and predicted times, each as a share of the
    fastest at its length. Lines stand where two winners change places beyond noise.
    """
    from plotly.subplots import make_subplots

    shown = [series for series, table in live.items() if len(table) >= _LENGTHS]
    if not shown:
        return
    names = sorted({name for series in shown for times in live[series].values() for name in times})
    figure = make_subplots(
        rows=len(shown),
        cols=2,
        subplot_titles=[f"{s}: {what}" for s in shown for what in ("measured", "predicted")],
        vertical_spacing=min(0.08, 0.3 / len(shown)),
        shared_yaxes=True,
    )
    for row, series in enumerate(shown, 1):
        for column, curves in enumerate((live[series], predicted[series]), 1):
            for colour, name in zip(_COLOURS, names, strict=False):
                lengths = [n for n, times in sorted(curves.items()) if name in times]
                best = [min(t.us for t in curves[n].values()) for n in lengths]
                times = [curves[n][name] for n in lengths]
                figure.add_scatter(
                    x=lengths,
                    y=[time.us / us for time, us in zip(times, best, strict=True)],
                    error_y=_bars(times, best),
                    customdata=[round(time.us / 1e3, 3) for time in times],
                    hovertemplate="%{x} tokens: %{customdata} ms, %{y:.3f}",
                    name=name,
                    legendgroup=name,
                    showlegend=row == column == 1,
                    mode="lines+markers",
                    line={"color": colour},
                    row=row,
                    col=column,
                )
        for each in inversions(live[series], predicted[series]):
            for column, at in enumerate((each.live, each.predicted), 1):
                if at is not None:
                    figure.add_vline(x=at, line_dash="dot", line_color="#999", row=row, col=column)
    figure.update_xaxes(type="log", title_text="tokens of a request")
    figure.update_yaxes(title_text="time / the fastest's", col=1)
    figure.update_layout(
        title="Time of single batches by length, as a share of the fastest configuration's",
        width=1100,
        height=120 + 340 * len(shown),
    )
    figure.write_html(page, include_plotlyjs="cdn", div_id="inversions")


def _bars(times: list[Time], best: list[float]) -> dict[str, object]:
    """One standard error each way, where there is noise."""
    noise = [time.noise_us / us for time, us in zip(times, best, strict=True)]
    return {"array": noise, "visible": any(noise)}
