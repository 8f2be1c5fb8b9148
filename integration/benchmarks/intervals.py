"""Held-out points of a real database: errors, and how often they lie in their 90% interval.

    python -m integration.benchmarks.intervals builtin:h200 [--seed 0 --seed 1] [-o h200]

For each seed a quarter of each signature's points is held out at random, and the
regressors are fitted to the rest: chosen, cross-validated and given intervals
without having seen the held-out points. Those that lie outside the range of what
was left, and so are told to extrapolate, are counted apart. The baseline is
that of the exporters: straight lines through the points, phases added up.

With ``--compositions`` everything but single prefills and equal decodes is held
out instead: what a sweep that measures nothing else can tell of real steps.

Writes a table (Markdown) and a packed CSV of every held-out point. Exit code 1 where the
mean error is larger than the baseline's, or where of the random quarters fewer
than 85% or more than 95% are covered, or the median half-width exceeds 10%.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd

from dooly_backend import console
from dooly_backend.database import Database
from dooly_backend.database.records import Measurement, Signature
from dooly_backend.errors import CheckFailed, InputError
from dooly_backend.regression.baseline import RoutingLatency, signature_latency
from dooly_backend.regression.fitting import fit_signatures
from dooly_backend.workload import WorkloadPoint

SHARE = 0.25
FEWEST = 8  # points of a signature, below which none is held out


@click.command(context_settings=console.CONTEXT_SETTINGS)
@click.argument("db")
@click.option("--seed", "seeds", type=int, multiple=True, default=(0,), help="May be repeated.")
@click.option(
    "--compositions",
    is_flag=True,
    help="Hold out every batch but single prefills and equal decodes, of attention only.",
)
@click.option("--model", metavar="NAME", help="Only what this model runs. [default: all]")
@console.output_option("Where to write: PATH.md and PATH.csv.")
def main(
    db: str, seeds: tuple[int, ...], compositions: bool, model: str | None, out: Path | None
) -> None:
    """Hold points out, predict them, and count."""
    measured = measurements(db, model)
    if compositions:
        measured = {s: m for s, m in measured.items() if s.name == "Attention"}
        frame = pd.DataFrame(held_out(0, *by_composition(measured)))
    else:
        splits = [(seed, *at_random(measured, seed)) for seed in seeds]
        frame = pd.DataFrame([row for split in splits for row in held_out(*split)])
    inside = frame[~frame.extrapolated]
    choice = "every composed batch" if compositions else f"{len(seeds)} random quarters"
    text = report(frame, f"{model} in {Path(db).name}" if model else Path(db).name, choice)
    click.echo(text)
    if out is not None:
        out.with_suffix(".md").write_text(text + "\n")
        columns = ["seed", "kind", "name", "point", "us", "predicted_us", "baseline_us"]
        columns += ["low_us", "high_us", "extrapolated", "regressor"]
        frame[columns].to_csv(out.with_suffix(".csv.xz"), index=False, float_format="%.5g")
    covered, width = inside.covered.mean(), inside.half_width.median()
    faults = []
    if not compositions:
        faults += [f"{100 * covered:.1f}% covered"] if not 0.85 <= covered <= 0.95 else []
        faults += [f"median half-width {100 * width:.1f}%"] if width > 0.1 else []
    better = inside.error.mean() <= inside.baseline_error.mean()
    faults += [] if better else ["worse than the baseline"]
    if faults:
        raise CheckFailed("; ".join(faults))


Measured = dict[Signature, list[Measurement]]


def measurements(db: str, model: str | None) -> Measured:
    """Everything measured in the database's first environment."""
    with Database.open(db, read_only=True) as database:
        environment_id, *_ = database.environments()
        run = {
            occurrence.signature.hash
            for id_, configuration in database.configurations().items()
            if model in (None, configuration.model)
            for occurrence in database.occurrences(id_, environment_id)
        }
        return {
            signature: found
            for hash_, signature in database.signatures().items()
            if hash_ in run and (found := database.measurements(hash_, environment_id))
        }


def at_random(measured: Measured, seed: int) -> tuple[Measured, Measured]:
    """What is kept of each signature, and the quarter that is held out."""
    random = np.random.default_rng(seed)
    kept: Measured = {}
    held: Measured = {}
    for signature, points in measured.items():
        number = int(len(points) * SHARE) if len(points) >= FEWEST else 0
        chosen = set(random.choice(len(points), number, replace=False).tolist())
        kept[signature] = [m for i, m in enumerate(points) if i not in chosen]
        held[signature] = [m for i, m in enumerate(points) if i in chosen]
    return kept, held


def by_composition(measured: Measured) -> tuple[Measured, Measured]:
    """Single prefills and equal decodes are kept, every other batch is held out."""
    plain = ("batch: prefill", "batch: decodes")
    kept = {s: [m for m in p if composition(m.point) in plain] for s, p in measured.items()}
    held = {s: [m for m in p if composition(m.point) not in plain] for s, p in measured.items()}
    return kept, held


def held_out(seed: int, kept: Measured, held: Measured) -> Iterator[dict[str, Any]]:
    """A row for each held-out point."""
    for signature, fitted in fit_signatures(kept).items():
        if not held[signature]:
            continue
        baseline = signature_latency(signature, kept[signature])
        predicted = fitted.predictor.predict_points([m.point for m in held[signature]])
        for i, measurement in enumerate(held[signature]):
            us, low, high, outside = (part[i] for part in predicted)
            plain = baseline_us(baseline, measurement.point)
            yield {
                "seed": seed,
                "kind": composition(measurement.point),
                "name": signature.name,
                "point": measurement.point.key,
                "us": measurement.median_us,
                "predicted_us": us,
                "baseline_us": plain,
                "low_us": low,
                "high_us": high,
                "extrapolated": outside,
                "regressor": fitted.model,
                "error": abs(us / measurement.median_us - 1),
                "baseline_error": abs(plain / measurement.median_us - 1),
                "covered": low <= measurement.median_us <= high,
                "half_width": (high - low) / 2 / us,
            }


def baseline_us(baseline: Any, point: WorkloadPoint) -> float:
    """What the baseline says of a point; NaN where it has nothing of the kind."""
    try:
        if isinstance(baseline, RoutingLatency):
            estimate, _ = baseline.at_routing(point.num_tokens or 0, point.num_experts or 0)
        else:
            estimate, _ = baseline.at(_batch(point))
    except InputError:
        return float("nan")
    return estimate.statistics.median_us


def _batch(point: WorkloadPoint) -> Any:
    from dooly_backend.workload import Batch

    if point.batch is not None:
        return point.batch
    if point.kind == "tokens":
        return Batch.prefill(point.num_tokens or 1)
    return Batch.decode(point.num_reqs or 1, 1)


def composition(point: WorkloadPoint) -> str:
    """What a point's time depends on; of a batch, what it is made of."""
    batch = point.batch
    if batch is None:
        return point.kind
    if batch.prefills and batch.decodes:
        return "batch: mixed"
    if batch.prefills:
        return "batch: prefill" if len(batch.prefills) == 1 else "batch: prefills"
    return "batch: decodes" if len(set(batch.requests)) == 1 else "batch: uneven decodes"


def report(frame: pd.DataFrame, db: str, choice: str) -> str:
    """The table of a run."""
    lines = [
        f"{len(frame)} held-out points of {db}, "
        f"{frame.name.nunique()} operations, {choice}. "
        "Errors are mean / 90th percentile.",
        "",
        "| points | number | error | baseline's error | covered | median half-width |",
        "|---|---|---|---|---|---|",
    ]
    inside = frame[~frame.extrapolated]
    groups = [*inside.groupby("kind"), ("all inside the range", inside)]
    for kind, part in [*groups, ("outside the range", frame[frame.extrapolated])]:
        if len(part):
            lines.append(
                f"| {kind} | {len(part)} | {_errors(part.error)} | {_errors(part.baseline_error)} "
                f"| {100 * part.covered.mean():.1f} % | {100 * part.half_width.median():.1f} % |"
            )
    return "\n".join(lines)


def _errors(errors: pd.Series) -> str:
    return f"{100 * errors.mean():.1f} / {100 * errors.quantile(0.9):.1f} %"


if __name__ == "__main__":
    console.run(main, "intervals")
