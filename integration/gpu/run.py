"""Profile models and backends one after the other into one database, within a time budget.

    python -m integration.gpu.run --db h200.db --out results --budget 540 \
        meta-llama/Llama-3.1-8B:FLASH_ATTN meta-llama/Llama-3.1-8B:FLASHINFER ...

A configuration may go on with an execution mode and a precision:
meta-llama/Llama-3.1-8B:FLASH_ATTN:eager:fp8+kv-fp8.

Every configuration runs in a process of its own, so that one that fails or
hangs costs only itself. What was timed is in the database at once; a second
call measures what is missing. With --additivity the live forward pass is
compared with the sum of its isolated calls, on batches of its own; with --ahead given
twice in both ways, and what is profiled is timed the first way.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

from dooly_backend.profiling.ahead import Ahead
from integration.additivity.rounds import BATCHES, GPU_BATCHES, measure_rows, of_way
from integration.additivity.run import named, show, ways_option, write
from integration.gpu.workers import in_turn, ready

LAYERS = 4
AUTO = "auto"  # as a backend: the engine's choice
DEPTH = "0: as few as show every kind; results of another depth than usual are named by it."
APART = "Behind it, another sweep into a database of its own, with the same engine."
_LEAST_SECONDS = 45  # an engine that starts and measures nothing takes about this long


@click.group()
def cli() -> None:
    """Profile on a host that has the engine and no network."""


@cli.command(name="all")
@click.argument(
    "configurations", nargs=-1, required=True, metavar="MODEL:BACKEND[:MODE[:PRECISION]]..."
)
@click.option("--db", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--budget", default=540.0, show_default=True, help="Seconds for everything.")
@click.option("--sweep", default=["gpu"], show_default=True, multiple=True, help="In turn.")
@click.option("--additivity/--no-additivity", default=True, show_default=True)
@click.option("--layers", default=LAYERS, show_default=True, help=DEPTH)
@ways_option
@click.option("--together", is_flag=True, help="Start all engines at once; they share the device.")
def run_all(
    configurations: tuple[str, ...],
    db: Path,
    out: Path,
    budget: float,
    sweep: tuple[str, ...],
    additivity: bool,
    layers: int,
    ways: tuple[Ahead, ...],
    together: bool,
) -> None:
    """Run every configuration in turn until the budget is spent."""
    end = time.monotonic() + budget
    out.mkdir(parents=True, exist_ok=True)
    options = ["--db", str(db), "--out", str(out), "--layers", str(layers)]
    options += [word for name in sweep for word in ("--sweep", name)]
    options += [word for way in ways for word in ("--ahead", way)]
    options.append("--additivity" if additivity else "--no-additivity")
    commands = {
        configuration: ["integration.gpu.run", "one", *configuration.split(":"), *options]
        for configuration in configurations
    }
    if together:
        codes = in_turn([[*command, "--wait"] for command in commands.values()], budget)
        for configuration, code in zip(configurations, codes, strict=True):
            click.echo(json.dumps({"configuration": configuration, "exit": code}))
        return
    for configuration in configurations:
        left = end - time.monotonic()
        if left < _LEAST_SECONDS:
            click.echo(f"{configuration}: not run, {left:.0f} s left", err=True)
            continue
        command = [sys.executable, "-m", *commands[configuration]]
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
@click.argument("mode", default="eager")
@click.argument("precision", default="")
@click.option("--db", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--sweep", default=["gpu"], show_default=True, multiple=True, help="In turn.")
@click.option("--apart", nargs=2, multiple=True, metavar="SWEEP DB", help=APART)
@click.option("--additivity/--no-additivity", default=True, show_default=True)
@click.option("--layers", default=LAYERS, show_default=True, help=DEPTH)
@click.option("--max-num-seqs", default=256, show_default=True)
@click.option("--max-num-batched-tokens", default=8192, show_default=True)
@click.option("--threads", type=int, help="Of a CPU engine.")
@ways_option
@click.option("--wait", is_flag=True, help="Start the engine, then wait for a line on stdin.")
@click.option("--staged", is_flag=True, help="Wait for another before the device is needed.")
def run_one(
    model: str,
    backend: str,
    db: Path,
    out: Path,
    mode: Any,
    precision: str,
    sweep: tuple[str, ...],
    apart: tuple[tuple[str, str], ...],
    additivity: bool,
    layers: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    threads: int | None,
    ways: tuple[Ahead, ...],
    wait: bool,
    staged: bool,
) -> None:
    """Profile MODEL with BACKEND; with auto, the engine chooses one.

    PRECISION is how the weights are quantised and, behind kv-, the KV cache: fp8, kv-fp8,
    or both: fp8+kv-fp8.
    """
    from rich.console import Console

    from dooly_backend.config import RunOptions, load_model, load_sweep
    from dooly_backend.database import Database
    from dooly_backend.engine_commands import progress_bar, running_engine
    from dooly_backend.profiling.measure import Regime
    from dooly_backend.profiling.profiler import profile

    options = RunOptions(
        model=load_model(model),
        backend=None if backend == AUTO else backend,
        layers=layers or None,
        execution_mode=mode,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        threads=threads,
        **precision_options(precision),
    )
    with running_engine(options, ready if staged else lambda: None) as engine:
        if wait:
            ready()
        for name, path in (*((name, db) for name in sweep), *apart):
            with (
                Database.open(path, create=True) as database,
                progress_bar(options.model.name) as progress,
            ):
                regime = Regime(ahead=ways[0])
                result = profile(engine, database, load_sweep(name), regime, progress)
            ran = {"sweep": name, "mode": mode, "precision": precision}
            click.echo(json.dumps({**ran, **summary(result, engine.configuration.backend)}))
        if additivity:
            on_gpu = engine.environment.device_kind == "cuda"
            rows = measure_rows(
                engine, result.trace, result.runnable, GPU_BATCHES if on_gpu else BATCHES, ways=ways
            )
            depth = "" if layers == LAYERS else f"{engine.num_layers}-layers"
            parts = [options.model.name.rpartition("/")[2], backend, mode, precision, depth]
            name = "-".join(part for part in parts if part)
            for way in ways:
                of_this = of_way(rows, way)
                write(of_this, named(out / f"additivity-{name}.csv", way))
                title = f"{name}, {engine.num_layers} layers, {engine.environment.device}; us"
                Console(width=110).print(show(of_this, f"{title}, ahead: {way}"))


def precision_options(text: str) -> dict[str, str]:
    """Fields of `RunOptions` for "fp8+kv-fp8": weights in fp8, KV cache in fp8."""
    words = [word for word in text.split("+") if word]
    caches = [word.removeprefix("kv-") for word in words if word.startswith("kv-")]
    weights = [word for word in words if not word.startswith("kv-")]
    if len(caches) > 1 or len(weights) > 1:
        raise click.BadParameter(f"{text!r} names two formats of one thing: write fp8+kv-fp8")
    return {
        **({"quantization": weights[0]} if weights else {}),
        **({"kv_cache_dtype": caches[0]} if caches else {}),
    }


def summary(result: Any, backend: str) -> dict[str, Any]:
    """What a profile did, in one line."""
    return {
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


if __name__ == "__main__":
    cli()
