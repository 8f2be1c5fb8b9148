"""Whole steps of the engine, one after the other as asynchronous scheduling runs them.

    python -m integration.gpu.steps MODEL --backend FLASH_ATTN --mode full_graph \
        --layers 4 --layers 12 -o steps.jsonl

For every depth the engine starts anew, since its graphs are captured for all
layers. One JSON line a batch: the median time between the tokens of two steps
(`interval_us`), what the host needed to launch one (`launch_us`), the wall time
of a step that is waited for (`wall_us`), and the quartiles of the first.
"""

from __future__ import annotations

import json
import lzma
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from dooly_backend.config import RunOptions, load_model
from dooly_backend.engines import Engine, boot
from dooly_backend.errors import EngineError
from dooly_backend.profiling.stream import ALONE, alone_us
from dooly_backend.workload import Batch
from integration.gpu.processors import ANYWHERE, Where
from integration.gpu.workers import in_turn, ready

#: Held out: the profile's own fit uses others (`profiling/stream.py`).
BATCHES = [
    *(Batch.decode(n, context) for n in (1, 4, 16, 32, 64, 128, 256) for context in (200, 1500)),
    *(Batch.decode(n, 8000) for n in (1, 8, 20)),
    Batch.decode(7, 600),
    Batch.decode(90, 500),
    *(Batch.prefill(n) for n in (16, 64, 128, 256, 400, 512, 600, 1024, 2048, 4096, 8192)),
    Batch.prefill(1000, 6000),
    Batch.prefill(128, count=4),
    Batch.prefill(128, count=16),
    Batch.prefill(1024, count=8),
    Batch.prefill(60) + Batch.decode(16, 700),
    Batch.prefill(200) + Batch.decode(32, 1000),
    Batch.prefill(400) + Batch.decode(100, 600),
    Batch.prefill(1024) + Batch.decode(64, 800),
    Batch.prefill(2000) + Batch.decode(128, 600),
    Batch.prefill(500, count=2) + Batch.decode(8, 1500),
]


@click.group()
def cli() -> None:
    """Time whole steps."""


@cli.command()
@click.argument("model")
@click.option("--backend")
@click.option("--mode", default="full_graph", show_default=True, help="eager: no graphs.")
@click.option("--layers", multiple=True, type=int, required=True, help="Once for every depth.")
@click.option("--max-num-seqs", default=256, show_default=True)
@click.option("--repeats", default=20, show_default=True)
@click.option("--rounds", default=1, show_default=True, help="Through all batches.")
@click.option("--budget", default=540.0, show_default=True, help="Seconds for everything.")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
def run(layers: tuple[int, ...], **settings: Any) -> None:
    """Every depth in a process of its own: they start together, and measure in turn."""
    commands = []
    for depth in layers:
        command = ["integration.gpu.steps", "one", settings["model"], "--depth", str(depth)]
        for name in ("backend", "mode", "max_num_seqs", "repeats", "rounds", "out"):
            if settings[name] is not None:
                command += [f"--{name.replace('_', '-')}", str(settings[name])]
        commands.append(command)
    codes = in_turn(commands, settings["budget"])
    if any(codes):
        sys.exit(f"exit codes by depth: {dict(zip(layers, codes, strict=True))}")


@cli.command()
@click.argument("model")
@click.option("--backend")
@click.option("--mode")
@click.option("--depth", type=int)
@click.option("--max-num-seqs", type=int)
@click.option("--repeats", type=int)
@click.option("--rounds", type=int)
@click.option("--out", type=click.Path(path_type=Path))
def one(
    model: str,
    backend: str | None,
    mode: Any,
    depth: int,
    max_num_seqs: int,
    repeats: int,
    rounds: int,
    out: Path,
) -> None:
    """One depth."""
    options = RunOptions(
        model=load_model(model),
        backend=backend,
        layers=depth,
        execution_mode=mode,
        compiled=mode != "eager",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
    )
    start = time.monotonic()
    with boot(options) as engine:
        click.echo(f"{depth} layers: started in {time.monotonic() - start:.0f} s", err=True)
        ready()
        with out.open("a") as file:
            for turn in range(rounds):
                for row in rows(engine, repeats, reverse=bool(turn % 2)):
                    about = {"model": model, "backend": backend, "mode": mode, "round": turn}
                    file.write(json.dumps(about | row) + "\n")
                    file.flush()


def read_rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines of JSON Lines files, packed (.xz) or not."""
    found: list[dict[str, Any]] = []
    for file in files:
        packed = file.read_bytes()
        text = lzma.decompress(packed) if file.suffix == ".xz" else packed
        found += map(json.loads, text.decode().splitlines())
    return found


def rows(
    engine: Engine,
    repeats: int,
    reverse: bool = False,
    batches: Sequence[Batch] = BATCHES,
    where: Where = ANYWHERE,
) -> Iterator[dict[str, Any]]:
    """One row for each of `batches` that the engine has room for; a held thread's has `where`."""
    for batch in reversed(batches) if reverse else batches:
        where.again()
        try:
            steps = engine.pipelined_steps(batch, repeats)
            wall = alone_us(engine, batch, ALONE)
        except EngineError as error:
            click.echo(f"{batch.key}: {error}", err=True)
            continue
        intervals = [step.interval_us for step in steps]
        low, middle, high = statistics.quantiles(intervals, n=4)
        yield {
            "layers": engine.num_layers,
            "batch": batch.key,
            "interval_us": round(middle, 1),
            "low_us": round(low, 1),
            "high_us": round(high, 1),
            "launch_us": round(statistics.median(step.launch_us for step in steps), 1),
            "wall_us": round(statistics.median(wall), 1),
            **where.about,
        }


if __name__ == "__main__":
    cli()
