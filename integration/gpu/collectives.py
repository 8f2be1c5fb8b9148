"""Collectives over a sweep of sizes, between the GPUs (or processes) of one host.

    python -m integration.gpu.collectives --db h200.db --degree 2
    python -m integration.gpu.collectives --db cpu.db --backend gloo --degree 2 --degree 4

Times are stored with one element a token, so that a point's tokens are elements;
the view `collective` of the database has them by bytes. The environment is the
one of this device that the database holds, or one of torch alone. What is there
is not measured again.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import click

from dooly_backend.database import Database
from dooly_backend.database.collectives import measured_collectives
from dooly_backend.errors import DoolyError
from dooly_backend.profiling.collectives import (
    OPERATIONS,
    Collective,
    available_degree,
    element_bytes,
    measure_collectives,
)
from dooly_backend.profiling.device_lock import device_lock
from dooly_backend.profiling.measure import Regime
from dooly_backend.workload import WorkloadPoint


def environment_id(database: Database, name: str | None) -> int:
    """The stored environment of this device, or a new one of torch."""
    import torch

    from dooly_backend.database.diff import choose
    from dooly_backend.engines.environment import environment_of

    if name is not None:
        return choose(database, name)
    own = environment_of("torch", torch.__version__, {})
    same = [
        i
        for i, e in database.environments().items()
        if e.device == own.device and e.engine != "torch"
    ]
    return same[0] if len(same) == 1 else database.add_environment(own)


COLUMNS = (
    "operation",
    "backend",
    "topology",
    "dtype",
    "bytes",
    "n",
    "min_us",
    "median_us",
    "max_us",
)


def write(database: Database, path: Path) -> None:
    """Every collective of the database, small sizes first."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for found in measured_collectives(database):
            m = found.measurement
            times = (f"{us:.1f}" for us in (m.min_us, m.median_us, m.max_us))
            place = (found.operation, found.backend, found.topology, found.dtype, found.bytes)
            writer.writerow((*place, len(m.samples_us), *times))


@click.command()
@click.option("--db", required=True, type=click.Path(path_type=Path))
@click.option("--degree", "degrees", multiple=True, type=int, help="[default: all powers of two]")
@click.option("--backend", type=click.Choice(["nccl", "gloo"]), help="[default: nccl with GPUs]")
@click.option("--operation", "operations", multiple=True, type=click.Choice(OPERATIONS))
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--least", default=10, show_default=True, help="Power of two of the fewest bytes.")
@click.option("--most", type=int, help="Power of two of the most bytes. [default: 28, gloo 24]")
@click.option("--repeats", default=15, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the view as CSV, too.")
@click.option("--environment", help="Whose measurements they are, where the database has several.")
def main(
    db: Path,
    degrees: tuple[int, ...],
    backend: str | None,
    operations: tuple[str, ...],
    dtype: str,
    least: int,
    most: int | None,
    repeats: int,
    out: Path | None,
    environment: str | None,
) -> None:
    """Measure collectives and store them in the database."""
    import torch

    from dooly_backend.engines.environment import device_identity

    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    limit = available_degree(backend)
    degrees = degrees or tuple(n for n in (2, 4, 8) if n <= limit)
    if not degrees or max(degrees) > limit:
        raise click.UsageError(f"this host has {limit} devices: --degree is at most {limit}")
    width = element_bytes(dtype)
    exponents = range(least, (most or (28 if backend == "nccl" else 24)) + 1)
    points = [WorkloadPoint("tokens", num_tokens=(1 << n) // width) for n in exponents]
    with Database.open(db, create=True) as database:
        place = environment_id(database, environment)
        wanted = {}
        for degree in degrees:
            for operation in operations or OPERATIONS:
                collective = Collective(operation, degree, dtype, 1, backend=backend)
                settled = database.settled_points(collective.signature.hash, place)
                missing = [point for point in points if point.key not in settled]
                if missing:
                    wanted[collective] = missing
        new = 0
        for collective, rest in wanted.items():  # one at a time: a killed run goes on
            with device_lock(device_identity()):
                found = measure_collectives({collective: rest}, Regime(repeats=repeats))
            new += database.record_all(collective.signature, place, found[collective])
            fastest, slowest = found[collective][0], found[collective][-1]
            click.echo(
                f"{collective.operation} {collective.topology} {backend}: "
                f"{fastest.median_us:.0f} us at {1 << exponents[0]} bytes, "
                f"{slowest.median_us:.0f} us at {1 << exponents[-1]}",
                err=True,
            )
        if out is not None:
            write(database, out)
    click.echo(json.dumps({"db": str(db), "degrees": degrees, "backend": backend, "points": new}))


if __name__ == "__main__":
    try:
        main()
    except DoolyError as error:
        sys.exit(f"error: {error}")
