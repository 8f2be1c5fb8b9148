"""Steps in a row at several depths: an engine in a process of its own for each.

    python -m dooly_backend.profiling.stream_run DATABASE < options.json

is such a process. An engine leaves its memory only with its process, and its
CUDA graphs are captured for all of its layers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from dooly_backend import console
from dooly_backend.config import RunOptions
from dooly_backend.database import Database
from dooly_backend.errors import EngineError
from dooly_backend.profiling.stream import (
    SHALLOW,
    deepest,
    measure_stream,
    place_of,
)
from dooly_backend.regression.store_cost import store_stream_cost


def depths_of(
    database: Database, ids: tuple[int, int], fewest: int, asked: Sequence[int] = ()
) -> list[int]:
    """The depths to measure: those `asked` for, else a shallow one and the deepest that fits.

    `fewest` layers show every kind of layer. Raises InputError where no engine fits.
    """
    if asked:
        return sorted(set(asked))
    configuration = database.configurations()[ids[0]]
    capacity = database.kv_capacity(*ids)
    most = configuration.layers_run
    if capacity is not None:
        on_gpu = database.environments()[ids[1]].device_kind == "cuda"
        most = deepest(capacity, configuration, on_gpu)
    return sorted({min(max(SHALLOW, fewest), most), most})


def whole_steps(
    options: RunOptions, db: Path, ids: tuple[int, int], fewest: int, asked: Sequence[int] = ()
) -> int:
    """Measure steps at the depths of `depths_of`, and fit what they cost; how many there are.

    Raises as `depths_of`, `measure_at_depths` and `store_stream_cost` do.
    """
    with Database.open(db) as database:
        depths = depths_of(database, ids, fewest, asked)
    measure_at_depths(options, db, depths)
    with Database.open(db) as database:
        store_stream_cost(database, ids)
        return len(database.stream_steps(*ids))


def measure_at_depths(options: RunOptions, db: Path, depths: Sequence[int]) -> None:
    """Measure what is missing at each of `depths`. Raises EngineError where an engine failed.

    What other depths gave is kept.
    """
    failed = []
    for depth in depths:
        compiled = options.execution_mode != "eager"
        text = options.model_copy(update={"layers": depth, "compiled": compiled}).model_dump_json()
        command = [sys.executable, "-m", "dooly_backend.profiling.stream_run", str(db)]
        done = subprocess.run(
            command, input=text, text=True, stdout=sys.stderr.fileno(), check=False
        )
        if done.returncode:
            failed.append(depth)
    if failed:
        layers = ", ".join(map(str, failed))
        raise EngineError(
            f"whole steps of {options.model.name} were not all measured: the engine of {layers} "
            "layers did not end well: see above, or choose others with --step-layers"
        )


@click.command()
@click.argument("db", type=click.Path(path_type=Path))
def main(db: Path) -> None:
    """One depth: read the options from stdin, measure, say what could not run."""
    from dooly_backend.engine_commands import progress_bar, running_engine
    from dooly_backend.profiling.host import measure_host

    options = RunOptions.model_validate_json(sys.stdin.read())
    with Database.open(db) as database:
        with running_engine(options) as engine, progress_bar(options.model.name) as progress:
            done = measure_stream(engine, database, progress=progress)
            ids = place_of(engine, database)
        if done.reasons:
            _, reason = next(iter(done.reasons.items()))
            click.echo(f"{len(done.reasons)} batches were left out; the first: {reason}", err=True)
        measure_host(database, ids, options.max_num_seqs)


if __name__ == "__main__":
    console.run(main, "dooly profile")
