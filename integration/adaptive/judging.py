"""Errors at the held-out places, from what each sweep measured and from parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from rich.table import Table

from dooly_backend.database import Database
from dooly_backend.database.records import Measurement, Signature
from dooly_backend.profiling.families import shape
from dooly_backend.regression.fitting import fit_signature
from dooly_backend.workload import WorkloadPoint

Samples = Mapping[Signature, Sequence[Measurement]]  # oldest first

SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # of the adaptive sweep's points, from the first
STEPS = (2, 4, 8, 16, 32)  # one in so many of the grid's


def judge(kind: str, folder: Path, only: Sequence[str] = ()) -> pd.DataFrame:
    """Every prediction: from all that each sweep measured, from parts of it.

    Reads what `measuring.measure` left in `folder`; `only` names regressors.
    """
    adaptive, vidur, held_out = (
        _measured(folder / f"{kind}-{name}.db") for name in ("adaptive", "vidur", "held-out")
    )
    tables = [
        judged(adaptive, held_out, ("adaptive", "all"), only),
        judged(vidur, held_out, ("Vidur's grid", "all"), only),
    ]
    for share in SHARES:
        part = {s: list(m[: round(share * len(m))]) for s, m in adaptive.items()}
        tables.append(judged(part, held_out, ("adaptive", f"first {share:.0%}"), only))
    for step in STEPS:
        part = {s: thinned(m, step) for s, m in vidur.items()}
        tables.append(judged(part, held_out, ("Vidur's grid", f"1 in {step}"), only))
    return pd.concat(tables, ignore_index=True)


def _measured(path: Path) -> Samples:
    with Database.open(path, read_only=True) as database:
        (environment_id,) = database.environments()
        measured = {
            s: database.measurements(s.hash, environment_id, oldest_first=True)
            for s in database.signatures().values()
        }
        return {s: found for s, found in measured.items() if found}


def described(kind: str, folder: Path) -> str:
    """What was measured on what, and how long each sweep took."""
    parts = []
    for name in ("adaptive", "vidur"):
        with Database.open(folder / f"{kind}-{name}.db", read_only=True) as database:
            ((configuration_id, configuration),) = database.configurations().items()
            ((environment_id, environment),) = database.environments().items()
            runs = database.runs(configuration_id, environment_id)
        seconds = sum(run.facts["seconds"] for run in runs)
        parts.append(f"{name} {seconds:.0f} s")
    where = f"{configuration.model}, {configuration.backend}, {environment.device}"
    return f"{kind}: {where}; {', '.join(parts)}"


def judged(
    samples: Samples, held_out: Samples, names: tuple[str, str], only: Sequence[str]
) -> pd.DataFrame:
    """Predictions at the held-out places from the regressors fitted to `samples`.

    `only` names the regressors to choose from; empty: all.
    """
    rows = []
    for signature, used in samples.items():
        wanted = held_out[signature]
        fitted = fit_signature(signature, used, only)
        predictions = fitted.predictor.predict_points([m.point for m in wanted])
        for measurement, predicted in zip(wanted, predictions.us, strict=True):
            measured = measurement.median_us
            rows.append(
                {
                    "sweep": names[0],
                    "part": names[1],
                    "signature": signature.hash[:12],
                    "name": signature.name,
                    "shape": _shape(measurement.point),
                    "point": measurement.point.key,
                    "points": len(used),
                    "measured_us": round(measured, 2),
                    "predicted_us": round(float(predicted), 2),
                    "regressor": fitted.model,
                    "error": abs(predicted / measured - 1),
                }
            )
    return pd.DataFrame(rows)


def thinned(measurements: Sequence[Measurement], step: int) -> list[Measurement]:
    """About one in `step`: along a curve every so many; of a plane as many rows and columns."""
    batches = [m.point.batch for m in measurements]
    if not all(batches):
        ordered = sorted(measurements, key=lambda m: m.point.num_tokens or 0)
        return [*ordered[::step], ordered[-1]] if len(ordered) % step != 1 else ordered[::step]
    rows = max(1, round(step**0.5))
    columns = max(1, round(step / rows))
    kept: list[Measurement] = []
    for decodes in (False, True):
        grid: dict[int, list[Measurement]] = {}
        for m in measurements:
            batch = m.point.batch
            if batch is not None and bool(batch.decodes) == decodes:
                size = batch.num_reqs if decodes else batch.num_tokens
                grid.setdefault(size, []).append(m)
        sizes = sorted(grid)
        for size in dict.fromkeys([*sizes[::rows], sizes[-1]]):
            line = sorted(grid[size], key=lambda m: m.point.batch.requests[0].context)  # type: ignore[union-attr]
            chosen = {m.point.key: m for m in [*line[::columns], line[-1]]}
            kept += chosen.values()
    return kept


def curves(table: pd.DataFrame) -> pd.DataFrame:
    """Mean error and its 90th percentile by sweep, part and shape; `points` are per signature."""
    both = pd.concat([table, table.assign(shape="all")])
    grouped = both.groupby(["sweep", "part", "shape"], sort=False)
    result = grouped.agg(
        points=("points", "mean"),
        places=("error", "size"),
        mean_error=("error", "mean"),
        p90_error=("error", lambda errors: errors.quantile(0.9)),
    )
    return result.reset_index().sort_values(["shape", "sweep", "points"], ignore_index=True)


def show(curve: pd.DataFrame, title: str) -> Table:
    """Mean errors of the whole sweeps, by shape of the batch."""
    table = Table(
        "sweep", "shape", "points", "places", "mean error", "90th percentile", title=title
    )
    for row in curve[curve["part"] == "all"].itertuples():
        table.add_row(
            row.sweep, row.shape, f"{row.points:.0f}", str(row.places),
            f"{row.mean_error:.1%}", f"{row.p90_error:.1%}",
        )  # fmt: skip
    return table


def _shape(point: WorkloadPoint) -> str:
    return shape(point.batch) if point.batch is not None else "tokens"
