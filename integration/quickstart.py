"""Profile a small model on this machine, export it to Vidur, and let Vidur simulate it.

    python integration/quickstart.py [MODEL]

Leaves latency.db and quickstart/vidur in the current folder. A second run finds
everything in the database and measures nothing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dooly_backend import console
from dooly_backend.config import RunOptions, load_model, load_sweep
from dooly_backend.database import Database
from dooly_backend.engine_commands import progress_bar, running_engine
from dooly_backend.exporters import get_exporter
from dooly_backend.profiling.profiler import ProfileResult, profile
from dooly_backend.regression.latency import LatencyModel
from integration.vidur.run import VidurResult, run_vidur

MODEL = "HuggingFaceTB/SmolLM-135M"
LAYERS = 4  # two would do for a trace; four tell the cost of a layer from that of a step
REQUESTS = 20


@click.command()
@click.argument("model", default=MODEL)
@click.option("--db", default=console.DEFAULT_DATABASE, show_default=True)
@click.option("--out", default="quickstart", show_default=True, type=click.Path(path_type=Path))
@click.option("--sweep", default="quick", show_default=True)
def quickstart(model: str, db: str, out: Path, sweep: str) -> None:
    """Profile MODEL, export it to Vidur, simulate 20 requests, and say what was found."""
    start = time.perf_counter()
    description = load_model(model)
    options = RunOptions(
        model=description,
        layers=min(LAYERS, description.num_layers),
        # An operation's threads wait for each other: one that has to share its
        # core stops them all, and the times say more about the neighbour.
        threads=max(1, len(os.sched_getaffinity(0)) - 1),
    )
    with Database.open(db, create=True) as database, running_engine(options) as engine:
        with progress_bar(description.name) as progress:
            result = profile(engine, database, load_sweep(sweep), progress=progress)
        latency = LatencyModel.load(
            database, engine.configuration.digest, engine.environment.digest
        )
    folder = out / "vidur"
    with console.log().status("exporting to Vidur"):
        get_exporter("vidur").export([latency], folder, {"layout": "pypi"})
    with console.log().status(f"Vidur simulates {REQUESTS} requests"):
        simulated = run_vidur(folder, requests=REQUESTS)
    show(result, simulated, latency, db, folder, time.perf_counter() - start)


def show(
    result: ProfileResult,
    simulated: VidurResult,
    latency: LatencyModel,
    db: str,
    folder: Path,
    seconds: float,
) -> None:
    """Print what was found and done."""
    table = Table(title="Dooly quickstart", show_header=False, title_justify="left")
    add = table.add_row
    environment = latency.environment
    add("model", f"{result.model}, {latency.configuration.num_layers} layers")
    add(
        "environment",
        f"{environment.device}, {environment.engine} {environment.engine_version}, "
        f"{latency.configuration.backend}",
    )
    add(
        "operations seen",
        f"{result.operations} in the traced pass; "
        f"{result.occurrences} calls in a step of the whole model",
    )
    add("labels", f"{result.trace.check.accuracy:.2%} right before the differential repair")
    add("signatures", f"{result.signatures_known} known, {result.signatures_new} new")
    measured = f"{result.points} new, in {result.seconds:.0f} s"
    if not result.points:
        measured = "none: the database knows all of this sweep"
    add("points measured", measured)
    if result.skipped or result.unstable:
        add("", f"{result.unstable} unstable, {result.skipped} skipped: see `dooly db info`")
    add("database", db)
    add("Vidur's files", f"{folder} (manifest.json says what is where)")
    summary = simulated.summary()
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        figures = summary[key]
        add(
            f"Vidur's {name}",
            ", ".join(f"{k} {1e3 * v:.1f}" for k, v in figures.items())
            + f" ms ({summary['requests']} requests)",
        )
    add("time", f"{seconds:.0f} s in all")
    Console().print(table)


if __name__ == "__main__":
    console.run(quickstart, "quickstart")
