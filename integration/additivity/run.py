"""Live steps beside the sum of isolated calls, taken in turns in one run.

    python -m integration.additivity.run [MODEL] [--layers 4] [--threads 1] [-o results]

For every batch the calls of one step are timed alone in Dooly's regime, in
rounds, and live steps of the same batch ahead of each round and behind it; what is
compared is a round with the mean of the live steps around it, so that a steady
drift of the host cancels. The calmer half of the rounds counts, by the sum of both
sides. Nothing is fitted to the forward pass. What the whole step costs beyond its
operations is fitted to every second batch and judged on the others, and the other
way round. With --ahead given twice each round has the calls timed in both ways of
`profiling/ahead.py`. Writes additivity.csv, one for each way but the usual named by
it, and prints a table.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import click
import pandas as pd
from rich.console import Console
from rich.table import Table

from dooly_backend.config import RunOptions, load_model
from dooly_backend.database.records import StepMeasurement
from dooly_backend.engines import boot
from dooly_backend.errors import DoolyError
from dooly_backend.operations.runnable import resolve
from dooly_backend.profiling.ahead import Ahead
from dooly_backend.profiling.measure import Regime
from dooly_backend.regression.step_cost import fit_step_cost
from dooly_backend.tracing.tracer import trace_model
from dooly_backend.workload import Batch
from integration.additivity.rounds import BATCHES, GPU_BATCHES, Row, measure_rows, of_way


def whole_steps(rows: Sequence[Row], layers: int) -> list[float]:
    """What each step costs beyond its operations, microseconds, fitted to rows it is not among.

    Every second row of a phase is one half; each half is predicted from the
    fit to the other.
    """
    turns: Counter[str] = Counter()
    halves = []
    for row in rows:
        halves.append(turns[row.phase] % 2)
        turns[row.phase] += 1
    steps = []
    for row in rows:
        beyond = statistics.median(live - isolated for live, isolated in row.rounds)
        batch = Batch.parse(row.batch)
        steps.append(StepMeasurement(batch, layers, (row.step_live_us,), row.step_live_us - beyond))
    costs = [
        fit_step_cost([step for step, of in zip(steps, halves, strict=True) if of != half])
        for half in (0, 1)
    ]
    return [
        costs[half].time_us(layers, step.batch.num_reqs)
        for step, half in zip(steps, halves, strict=True)
    ]


def show(rows: list[Row], title: str, steps: Sequence[float] = ()) -> Table:
    """The rows and, by phase, the mean absolute and the worst errors.

    `steps` are what the steps cost beyond their operations, where that was fitted.
    """
    heads = ["batch", "forward live", "isolated", "error", "step live", "operations"]
    table = Table(*heads, *(["own cost", "error"] if steps else []), "drift", title=title)
    errors = step_errors(rows, steps)
    for i, row in enumerate(rows):
        table.add_row(
            row.batch,
            f"{row.forward_live_us:.0f}",
            f"{row.forward_isolated_us:.0f}",
            f"{row.forward_error:+.1f}%",
            f"{row.step_live_us:.0f}",
            f"{row.step_isolated_us:.0f}",
            *([f"{steps[i]:.0f}", f"{errors[i]:+.1f}%"] if steps else []),
            f"{row.drift:.1f}%",
        )
    for phase in ("prefill", "decode", "mixed"):
        of_phase = [i for i, row in enumerate(rows) if row.phase == phase]
        if of_phase:
            forward = _figures(abs(rows[i].forward_error) for i in of_phase)
            whole = ["", _figures(abs(errors[i]) for i in of_phase)] if steps else []
            table.add_row(f"{phase}: mean / worst", "", "", forward, "", "", *whole, style="bold")
    return table


def step_errors(rows: Sequence[Row], own: Sequence[float]) -> list[float]:
    """Percent by which calls and `own` cost differ from the live step, medians over the rounds."""
    return [
        100 * (statistics.median((isolated + us) / live for live, isolated in row.rounds) - 1)
        for row, us in zip(rows, own, strict=False)
    ]


def _figures(errors: Iterable[float]) -> str:
    values = list(errors)
    return f"{statistics.fmean(values):.1f}% / {max(values):.1f}%"


def named(path: Path, way: Ahead) -> Path:
    """additivity.csv, or additivity-layer.csv for a way that is not the usual one."""
    return path if way == Regime().ahead else path.with_stem(f"{path.stem}-{way}")


def ways_option(function: Callable[..., None]) -> Callable[..., None]:
    """--ahead WAY, which may be given again: `ways`, distinct and in order."""
    return click.option(
        "--ahead",
        "ways",
        multiple=True,
        type=click.Choice(get_args(Ahead)),
        default=[Regime().ahead],
        show_default=True,
        callback=lambda _context, _option, given: tuple(dict.fromkeys(given)),
        help="What runs ahead of a call that is timed alone; may be given again.",
    )(function)


def write(rows: Sequence[Row], path: Path, steps: Sequence[float] = ()) -> None:
    """The rows as CSV, with the steps' own costs and errors where there are any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame([asdict(row) for row in rows]).drop(columns=["rounds", "ahead"])
    if steps:
        frame = frame.assign(step_own_us=steps, step_error=step_errors(rows, steps))
    frame.round(2).to_csv(path, index=False)


@click.command()
@click.argument("model", default="HuggingFaceTB/SmolLM-135M")
@click.option("--layers", default=4, show_default=True, type=click.IntRange(1))
@click.option("--backend", help="The attention backend.")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1))
@click.option("--dtype", help="As of `dooly profile`; processors without AVX-512 are slow in bf16.")
@click.option(
    "--times",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="As many rounds as usual, for a host that drifts.",
)
@click.option("--most-tokens", type=click.IntRange(1), help="Leave out larger steps.")
@ways_option
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for additivity.csv.")
def main(
    model: str,
    layers: int,
    backend: str | None,
    threads: int,
    dtype: str | None,
    times: int,
    most_tokens: int | None,
    ways: tuple[Ahead, ...],
    out: Path | None,
) -> None:
    """Compare MODEL's live steps with the sums of its isolated calls."""
    try:
        options = RunOptions(
            model=load_model(model),
            layers=layers,
            backend=backend,
            threads=threads,
            dtype=dtype,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
        )
        engine = boot(options)
    except DoolyError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    trace = trace_model(engine)
    environment = engine.environment
    batches = GPU_BATCHES if environment.device_kind == "cuda" else BATCHES
    batches = [b for b in batches if b.num_tokens <= (most_tokens or b.num_tokens)]
    rows = measure_rows(engine, trace, resolve(trace, engine), batches, times, ways)
    title = (
        f"{options.model.name}, {engine.configuration.backend}, {engine.configuration.dtype}, "
        f"{layers} layers, "
        f"{environment.device}, {environment.engine} {environment.engine_version}; microseconds"
    )
    for way in ways:
        of_this = of_way(rows, way)
        # A GPU computes while its host prepares: whole steps there are no sum.
        steps = whole_steps(of_this, layers) if environment.device_kind == "cpu" else []
        Console(width=120).print(show(of_this, f"{title}, ahead: {way}", steps))
        if out is not None:
            write(of_this, named(out / "additivity.csv", way), steps)


if __name__ == "__main__":
    main()
