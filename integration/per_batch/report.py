"""Live single batches beside their prediction, the winners by length, and their inversions.

    python -m integration.per_batch.report --db builtin:h200 \
        -o integration/per_batch/results/h200 results/per-batch-*.jsonl

The files are those of `integration.per_batch.measure`; those of `integration.gpu.step_costs`
do, too. Writes per-batch.csv (every batch), winners.csv (for each series of batches
and length: who is fastest), inversions.csv and inversions.html. Needs no engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click
import pandas as pd

from dooly_backend.database import Database
from integration.gpu.steps import read_rows
from integration.per_batch.batches import Series
from integration.per_batch.errors import HEADLINE, compared, mape
from integration.per_batch.figure import draw
from integration.per_batch.inversions import Time, fastest, inversions, lost, winners
from integration.per_batch.live import measured

#: Times by length and configuration.
Table = dict[int, dict[str, Time]]

_WINNERS = (
    "kind", "requests", "length", "configurations", "winners", "fastest", "predicted", "right",
    "lost_percent", "worst_percent",
)  # fmt: skip


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--db", required=True)
@click.option("--environment", help="Where the database holds several.")
@click.option("--all-depths", is_flag=True, help="Of an engine of few layers, too.")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
def main(
    files: tuple[Path, ...], db: str, environment: str | None, all_depths: bool, out: Path
) -> None:
    """Compare FILES with what the database predicts."""
    rows = read_rows(files)
    found = measured(rows)
    if not all_depths:
        deepest: dict[object, int] = {}
        for each in found:
            served = each.engine.served
            deepest[served] = max(deepest.get(served, 0), each.engine.layers)
        found = [each for each in found if each.engine.layers == deepest[each.engine.served]]
    with Database.open(db, read_only=True) as database:
        batches = compared(database, found, environment)
    out.mkdir(parents=True, exist_ok=True)
    batches.round(2).to_csv(out / "per-batch.csv", index=False)
    live, predicted = curves(batches, "live_us", "noise_us"), curves(batches, "predicted_us")
    by_length = winners_table(live, predicted)
    by_length.to_csv(out / "winners.csv", index=False)
    pairs = inversions_table(live, predicted)
    pairs.to_csv(out / "inversions.csv", index=False)
    draw(live, predicted, out / "inversions.html")
    with pd.option_context("display.width", 200, "display.max_columns", 30):
        click.echo(summary(batches).round(1).to_string())
        click.echo(pairs.to_string(index=False) if len(pairs) else "no inversion beyond noise")


def curves(batches: pd.DataFrame, us: str, noise: str | None = None) -> dict[Series, Table]:
    """Times of all series in which more than one configuration was measured.

    Of how a batch ran, that which its kind is judged by.
    """
    chosen = batches[batches["length"].notna() & (batches["how"] == batches["kind"].map(HEADLINE))]
    tables: dict[Series, Table] = defaultdict(lambda: defaultdict(dict))
    for row in chosen.to_dict("records"):
        series = Series(row["kind"], int(row["requests"]))
        time = Time(row[us], row[noise] if noise else 0.0)
        tables[series][int(row["length"])][label(row)] = time
    return {
        series: dict(table)
        for series, table in sorted(tables.items())
        if len({name for times in table.values() for name in times}) > 1
    }


def label(row: Mapping[str, object]) -> str:
    """A configuration as tables and figures call it; what is usual is not said."""
    usual = {"full_graph", "none", "auto"}
    more = [str(row[n]) for n in ("execution_mode", "quantization", "kv_cache_dtype")]
    name = f"{str(row['model']).rpartition('/')[2]}, {row['backend']}"
    return ", ".join([name, *(word for word in more if word not in usual)])


def winners_table(live: dict[Series, Table], predicted: dict[Series, Table]) -> pd.DataFrame:
    """For every series and length: who wins live, who by prediction, and what to follow that costs.

    `lost_percent` is by how much the predicted winner is slower, live, than the fastest.
    """
    rows = []
    for series, table in live.items():
        for length, times in sorted(table.items()):
            if len(times) < 2:
                continue
            best, chosen = winners(times), fastest(predicted[series][length])
            rows.append(
                {
                    "kind": series.kind,
                    "requests": series.requests,
                    "length": length,
                    "configurations": len(times),
                    "winners": "; ".join(sorted(best)),
                    "fastest": fastest(times),
                    "predicted": chosen,
                    "right": chosen in best,
                    "lost_percent": round(lost(times, chosen), 2),
                    "worst_percent": round(max(lost(times, name) for name in times), 2),
                }
            )
    return pd.DataFrame(rows, columns=_WINNERS)


def inversions_table(live: dict[Series, Table], predicted: dict[Series, Table]) -> pd.DataFrame:
    """Every inversion that the live times show beyond noise."""
    rows = []
    for series, table in live.items():
        for each in inversions(table, predicted[series]):
            rows.append({**asdict(series), **asdict(each)})
    columns = [*Series.__dataclass_fields__, "before", "after", "low", "high"]
    frame = pd.DataFrame(rows, columns=[*columns, "live", "predicted", "verdict"])
    return frame.round({"live": 0, "predicted": 0})


def summary(batches: pd.DataFrame) -> pd.DataFrame:
    """Mean and worst absolute error and mean noise, percent, by configuration and kind."""
    rows = []
    for (name, kind, how), group in batches.groupby(
        [batches.apply(label, axis=1), "kind", "how"], sort=False
    ):
        mean, worst = mape(group["error_percent"])
        noise = group["noise_percent"].mean()
        rows.append(
            (name, kind, how, len(group), mean, worst, noise, (group["in_fit"] != "").sum())
        )
    columns = ["configuration", "kind", "how", "batches", "mape", "worst", "noise", "in_fit"]
    return pd.DataFrame(rows, columns=columns)


if __name__ == "__main__":
    main()
