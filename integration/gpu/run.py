"""Profile models and backends one after the other into one database, within a time budget.

    python -m integration.gpu.run --db h200.db --out results --budget 540 \
        meta-llama/Llama-3.1-8B:FLASH_ATTN meta-llama/Llama-3.1-8B:FLASHINFER ...

Every configuration runs in a process of its own, so that one that fails or
hangs costs only itself. What was timed is in the database at once; a second
call measures what is missing. With --additivity the live forward pass is
compared with the sum of its isolated calls, on batches of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import click

from integration.additivity.run import BATCHES, GPU_BATCHES, measure_rows, show, write

LAYERS = 4
_LEAST_SECONDS = 45  # an engine that starts and measures nothing takes about this long


@click.group()
def cli() -> None:
    """Profile on a host that has the engine and no network."""


@cli.command(name="all")
@click.argument("configurations", nargs=-1, required=True, metavar="MODEL:BACKEND...")
@click.option("--db", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--budget", default=540.0, show_default=True, help="Seconds for everything.")
@click.option("--sweep", default="gpu", show_default=True)
@click.option("--additivity/--no-additivity", default=True, show_default=True)
def run_all(
    configurations: tuple[str, ...],
    db: Path,
    out: Path,
    budget: float,
    sweep: str,
    additivity: bool,
) -> None:
    """Run every configuration in turn until the budget is spent."""
    end = time.monotonic() + budget
    out.mkdir(parents=True, exist_ok=True)
    for configuration in configurations:
        left = end - time.monotonic()
        if left < _LEAST_SECONDS:
            click.echo(f"{configuration}: not run, {left:.0f} s left", err=True)
            continue
        model, _, backend = configuration.rpartition(":")
        command = [
            sys.executable, "-m", "integration.gpu.run", "one", model, backend,
            "--db", str(db), "--out", str(out), "--sweep", sweep,
            "--additivity" if additivity else "--no-additivity",
        ]  # fmt: skip
        start = time.monotonic()
        try:
            code = subprocess.run(command, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
        result = {"configuration": configuration, "exit": code}
        result["seconds"] = round(time.monotonic() - start, 1)
        click.echo(json.dumps(result))


@cli.command(name="one")
@click.argument("model")
@click.argument("backend")
@click.option("--db", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--sweep", default="gpu", show_default=True)
@click.option("--additivity/--no-additivity", default=True, show_default=True)
@click.option("--layers", default=LAYERS, show_default=True)
def run_one(
    model: str, backend: str, db: Path, out: Path, sweep: str, additivity: bool, layers: int
) -> None:
    """Profile MODEL with BACKEND."""
    from rich.console import Console

    from dooly_backend.config import RunOptions, load_model, load_sweep
    from dooly_backend.database import Database
    from dooly_backend.engine_commands import progress_bar, running_engine
    from dooly_backend.profiling.profiler import profile

    options = RunOptions(
        model=load_model(model),
        backend=backend,
        layers=layers,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )
    with Database.open(db, create=True) as database, running_engine(options) as engine:
        with progress_bar(options.model.name) as progress:
            result = profile(engine, database, load_sweep(sweep), progress=progress)
        summary = {
            "model": result.model,
            "backend": backend,
            "operations": result.operations,
            "label_accuracy": result.trace.check.accuracy,
            "signatures_known": result.signatures_known,
            "signatures_new": result.signatures_new,
            "points": result.points,
            "skipped": result.skipped,
            "unstable": result.unstable,
            "seconds": round(result.seconds, 1),
        }
        click.echo(json.dumps(summary))
        if additivity:
            on_gpu = engine.environment.device_kind == "cuda"
            rows = measure_rows(
                engine, result.trace, result.runnable, GPU_BATCHES if on_gpu else BATCHES
            )
            name = f"{options.model.name.rpartition('/')[2]}-{backend}"
            write(rows, out / f"additivity-{name}.csv")
            title = f"{name}, {layers} layers, {engine.environment.device}; microseconds"
            Console(width=110).print(show(rows, title))


if __name__ == "__main__":
    cli()
