"""How well sweeps predict points that none of them has: of one device, in several databases.

    python -m integration.cost.held_out integration/cost/results/h200/scan.db.xz \
        builtin:h200 integration/cost/results/h200/adaptive.db.xz -o integration/cost/results/h200

The first database holds the points to predict (`scan.yaml`), each other one is fitted by
itself, signature by signature. Only signatures that all of them measured count, and
points that none of them fits. Calls below 5 us are rows of their own: a timer sees them in
steps of a third of their time, and the adaptive sweep takes their errors relative to 5 us.
Writes held-out.csv and prints a table. No engine, no torch.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from dooly_backend.database import Database
from dooly_backend.database.records import Measurement, Signature
from dooly_backend.errors import DoolyError, InputError
from dooly_backend.profiling.evidence import SHORTEST_US
from dooly_backend.regression.fitting import fit_signatures
from integration.accuracy.tables import table
from integration.benchmarks.intervals import composition
from integration.cost.packed import unpacked


@click.command()
@click.argument("scan")
@click.argument("databases", nargs=-1, required=True)
@click.option("-o", "--out", required=True, type=click.Path(file_okay=False, path_type=Path))
def main(scan: str, databases: Sequence[str], out: Path) -> None:
    """Predict the points of SCAN from each of DATABASES."""
    truth = measured(scan)
    known = {name: measured(name) for name in databases}
    rows = compared(truth, known)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "held-out.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    cells = [[str(value) for value in row.values()] for row in rows]
    click.echo("\n".join(table([name.replace("_", " ") for name in rows[0]], cells)))


Measured = dict[Signature, list[Measurement]]


def measured(name: str) -> Measured:
    """The measurements of a database, which may be packed, by signature.

    Raises InputError where it is of several environments.
    """
    with unpacked(name) as path, Database.open(path, read_only=True) as database:
        environments = list(database.environments())
        if len(environments) != 1:
            raise InputError(f"{name} is of {len(environments)} environments: give one's alone")
        known = database.signatures().values()
        found = {s: database.measurements(s.hash, environments[0]) for s in known}
    return {signature: each for signature, each in found.items() if each}


def compared(truth: Measured, known: dict[str, Measured]) -> list[dict[str, object]]:
    """A row for each kind of points and database: errors in percent of what was measured.

    Raises InputError where the databases have no signature in common.
    """
    common = [s for s in truth if all(s in each for each in known.values())]
    if not common:
        raise InputError(f"{', '.join(known)} measured nothing that the scan has")
    seen = {(s, m.point.key) for each in known.values() for s in common for m in each[s]}
    held_out = {s: [m for m in truth[s] if (s, m.point.key) not in seen] for s in common}
    short = {s for s in common if max(m.median_us for m in truth[s]) < SHORTEST_US}
    rows: list[dict[str, object]] = []
    for name, each in known.items():
        fitted = fit_signatures({s: each[s] for s in common})
        errors: dict[str, list[float]] = {}
        for signature, left in held_out.items():
            if not left:
                continue
            us = fitted[signature].predictor.predict_points([m.point for m in left]).us
            for m, predicted in zip(left, us.tolist(), strict=True):
                errors.setdefault(kind_of(m, signature in short), []).append(
                    100 * (predicted / m.median_us - 1)
                )
        points: dict[str, int] = {}
        for signature in common:
            for m in each[signature]:
                kind = kind_of(m, signature in short)
                points[kind] = points.get(kind, 0) + 1
        for kind, values in sorted(errors.items()):
            sizes = np.abs(values)
            rows.append(
                {
                    "points": kind,
                    "database": Path(name).name,
                    "measured": points.get(kind, 0),
                    "held_out": len(values),
                    "mean_percent": round(float(sizes.mean()), 1),
                    "p90_percent": round(float(np.percentile(sizes, 90)), 1),
                    "bias_percent": round(float(np.mean(values)), 1),
                }
            )
    return sorted(rows, key=lambda row: str(row["points"]))


def kind_of(measurement: Measurement, is_short: bool) -> str:
    """The row that a point counts in: by its composition, and whether its calls are short."""
    kind = composition(measurement.point)
    return f"{kind}, below {SHORTEST_US:g} us" if is_short else kind


if __name__ == "__main__":
    try:
        main()
    except DoolyError as error:
        sys.exit(f"error: {error}")
