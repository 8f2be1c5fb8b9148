"""How a device's clock gives way under prefills and recovers: steps in a row, and the fit.

    python -m integration.gpu.clock run meta-llama/Llama-3.1-8B --backend FLASH_ATTN \
        --mode full_graph --layers 32 -o clock.jsonl
    python -m integration.gpu.clock run ... --layers 4 -o clock.jsonl
    python -m integration.gpu.clock fit clock.jsonl

One JSON line a step (`ClockStep`). `--wait` starts the engine and waits for a
line on stdin, as a worker of `integration.gpu.workers`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dooly_backend.database.records import ClockStep
from dooly_backend.regression.clock import fit_clock


@click.group()
def cli() -> None:
    """Measure and fit the response of a device's clock."""


@cli.command()
@click.argument("model")
@click.option("--backend")
@click.option("--mode", default="full_graph", show_default=True, help="eager: no graphs.")
@click.option("--layers", type=int, default=32, show_default=True)
@click.option("--wait", is_flag=True, help="Start the engine, then wait for a line on stdin.")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
def run(
    model: str,
    backend: str | None,
    mode: Any,
    layers: int,
    wait: bool,
    out: Path,
) -> None:
    """Measure MODEL's steps."""
    from dooly_backend.config import RunOptions, load_model
    from dooly_backend.engines import boot
    from dooly_backend.profiling.clock import measure_clock
    from integration.gpu.workers import ready

    options = RunOptions(
        model=load_model(model),
        backend=backend,
        layers=layers,
        execution_mode=mode,
        compiled=mode != "eager",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )
    with boot(options) as engine, out.open("a") as file:
        if wait:
            ready()
        steps = measure_clock(engine)
        for step in steps:
            file.write(json.dumps({"model": model, "mode": mode} | asdict(step)) + "\n")
        click.echo(f"{model}, {layers} layers, {mode}: {len(steps)} steps")


@cli.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True))
def fit(file: Path) -> None:
    """Fit what FILE holds: steps of one model, of one depth or of several."""
    rows = defaultdict(list)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        about = row.pop("model"), row.pop("mode")
        rows[about].append(ClockStep(**row))
    for about, steps in rows.items():
        found = fit_clock(steps)
        response = found.response
        click.echo(
            f"{', '.join(about)}: cool {response.cool:.3f}, slope {response.slope:.3f}, tau "
            f"{response.tau_s:.3f} s, warm {response.warm_tokens:.0f} tokens; "
            f"mean error {found.mean_error:.2%} of {found.steps} steps"
        )


if __name__ == "__main__":
    cli()
