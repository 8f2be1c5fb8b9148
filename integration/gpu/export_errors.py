"""How far the steps of exports are from measured ones that no fit has seen.

    python -m integration.gpu.export_errors --db builtin:h200 -o results/export-errors.csv \
        steps-*.jsonl

The files are those of `integration.gpu.steps`: steps in a row at the engine's defaults. Each is
priced by the rules of a simulator over the tables that its exporter writes (tests hold the rules
against the simulators themselves), by the database's own step (`LatencyModel.step_us`), and as
the sum of its operations. Needs neither engine nor simulator; a minute for each configuration.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import pandas as pd
from joblib import Parallel, delayed

from dooly_backend.database import Database
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch
from integration.gpu.step_errors import Served, digest_of, kind_of
from integration.gpu.steps import read_rows
from shims.llmservingsim.architecture import architecture_of
from shims.llmservingsim.costs import LayerCosts
from shims.llmservingsim.grids import choose_grids
from shims.llmservingsim.options import LLMServingSimOptions
from shims.llmservingsim.rules import LLMServingSimRules
from shims.llmservingsim.tables import build_tables as build_llmservingsim
from shims.times import axes_of
from shims.vidur.costs import StepCosts
from shims.vidur.model import dimensions_of
from shims.vidur.options import VidurOptions
from shims.vidur.ranges import Layout, choose_ranges
from shims.vidur.rules import VidurRules
from shims.vidur.tables import build_tables as build_vidur

#: Who prices a step: columns of the CSV.
PRICES = SUM, STEP, REPOSITORY, RELEASE, LLMSERVINGSIM = (
    "operations",
    "database",
    "vidur_repo",
    "vidur_pypi",
    "llmservingsim",
)
Price = Callable[[Batch], float]  # microseconds


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--db", default="builtin:h200", show_default=True)
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(1))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Every step, as CSV.")
def main(files: tuple[Path, ...], db: str, jobs: int, out: Path | None) -> None:
    """Print errors by kind of batch and by who prices it; write every step."""
    found: dict[Served, list[Mapping[str, Any]]] = defaultdict(list)
    for row in read_rows(files):
        found[Served.of(row)].append(row)
    tasks = (delayed(priced)(db, served, rows) for served, rows in found.items())
    steps = pd.concat(Parallel(n_jobs=jobs)(tasks), ignore_index=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        steps.round(0).to_csv(out, index=False)
    with pd.option_context("display.width", 160, "display.max_columns", 20):
        click.echo(summary(steps).round(1).to_string())


def priced(db: str, served: Served, rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per batch of the deepest engine."""
    with Database.open(db, read_only=True) as database:
        model = LatencyModel.load(database, digest_of(database, served))
    depth = max(row["layers"] for row in rows)
    measured: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["layers"] == depth:
            measured[row["batch"]].append(row["interval_us"])
    prices = prices_of(model)
    table = []
    for key, samples in measured.items():
        batch = Batch.parse(key)
        row = {
            "model": served.model,
            "backend": served.backend,
            "execution_mode": served.mode,
            "kind": kind_of(batch),
            "batch": key,
            "measured_us": median(samples),
        }
        table.append(row | {name: _priced(price, batch) for name, price in prices.items()})
    return pd.DataFrame(table)


def _priced(price: Price, batch: Batch) -> float:
    """Microseconds; nothing beyond the tables, where the simulator stops, too."""
    try:
        return price(batch)
    except KeyError:
        return math.nan


def prices_of(model: LatencyModel) -> dict[str, Price]:
    """Who prices a step."""
    return {
        SUM: model.operations_us,
        STEP: model.step_us,
        REPOSITORY: _vidur(model, "repo"),
        RELEASE: _vidur(model, "pypi"),
        LLMSERVINGSIM: _llmservingsim(model),
    }


def _vidur(model: LatencyModel, layout: Layout) -> Price:
    costs = StepCosts(model)
    ranges = choose_ranges(costs, VidurOptions(layout=layout), layout)
    dimensions = dimensions_of(model.configuration, model.occurrences)
    tables = build_vidur([costs], dimensions, ranges, layout)
    rules = VidurRules(tables, layout, ranges.granularity, costs.layers)
    return lambda batch: 1e3 * rules.step_ms(batch)


def _llmservingsim(model: LatencyModel) -> Price:
    costs = LayerCosts(model, architecture_of(model.configuration, model.occurrences))
    axes = axes_of([model])
    tables = build_llmservingsim([costs], choose_grids(axes, LLMServingSimOptions()), axes)
    return LLMServingSimRules(tables, costs.architecture, costs.layers, 1).step_us


def errors_of(steps: pd.DataFrame) -> pd.DataFrame:
    """Signed errors in percent of each step, by who prices it; those columns alone."""
    priced = steps[[name for name in PRICES if name in steps]]
    return priced.div(steps["measured_us"], axis=0).sub(1).mul(100)


def summary(steps: pd.DataFrame) -> pd.DataFrame:
    """Mean and worst absolute errors in percent, by configuration, kind and who prices."""
    by = [steps[name] for name in ("model", "backend", "execution_mode", "kind")]
    return errors_of(steps).abs().groupby(by, sort=False).agg(["mean", "max"])


if __name__ == "__main__":
    main()
