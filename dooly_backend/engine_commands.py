"""`dooly trace` and `dooly profile`: the commands that start an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dooly_backend import console

if TYPE_CHECKING:
    from rich.table import Table

    from dooly_backend.config import RunOptions
    from dooly_backend.engines import Engine
    from dooly_backend.profiling.plan import Plan
    from dooly_backend.profiling.profiler import ProfileResult


@click.command()
@click.argument("model")
@console.engine_options
@console.output_option("Write the trace to this JSON file.")
@console.json_option
def trace(model: str, engine_settings: dict[str, Any], out: Path | None, as_json: bool) -> None:
    """Show what a model runs, and where each dimension comes from.

    MODEL is a folder with a Hugging Face config.json, such a file, or a name
    that `dooly models` lists. One mixed step runs in the real engine with dummy
    weights; T marks what grows with the tokens, R with the requests, E the
    engine's buffers; plain numbers are the model's.

    \b
    Examples:
      dooly trace smollm-135m
      dooly trace ./my-model --tp 2 -o trace.json
    """
    from dooly_backend.operations.render import render

    with running_engine(_options(model, engine_settings)) as engine:
        # It needs torch: a host without an engine has none.
        from dooly_backend.tracing.tracer import trace_model

        result = trace_model(engine)
    if out is not None:
        result.save(out)
    if as_json:
        sizes = result.labels()
        console.print_json(
            {
                "model": result.model,
                "operations": len(result.operations),
                "dimensions": sum(sizes.values()),
                "labels": dict(sizes),
                "unlabelled": len(result.unlabelled()),
                "accuracy": result.check.accuracy,
                "repaired": result.check.repaired,
                "seconds": round(result.seconds, 3),
            }
        )
    else:
        console.show(render(result))


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@console.database_option
@console.engine_options
@console.sweep_option
@click.option("--dry-run", is_flag=True, help="Only show what would be measured, as `dooly plan`.")
@click.option(
    "--confirm-from",
    metavar="ENV",
    help="Take over the points of this older environment of the database (its digest, or a part "
    "of its engine and version) where a few, measured anew, have not moved.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="With --confirm-from: percent that a median may move by.",
)
@click.option(
    "--whole-steps/--no-whole-steps",
    default=None,
    help="Also time whole steps as the engine runs them by default (compiled, CUDA graphs), in "
    "a process for each depth. [default: on a GPU]",
)
@click.option(
    "--step-layers",
    metavar="N",
    type=click.IntRange(min=1),
    multiple=True,
    help="Layers of the engines that run whole steps; may be repeated. [default: 4, and as many "
    "as fit]",
)
@console.json_option
@click.pass_context
def profile(
    ctx: click.Context,
    models: tuple[str, ...],
    db: str,
    engine_settings: dict[str, Any],
    sweep_name: str,
    dry_run: bool,
    confirm_from: str | None,
    tolerance: float,
    whole_steps: bool | None,
    step_layers: tuple[int, ...],
    as_json: bool,
) -> None:
    """Time a model's operations that the database does not know yet.

    The model is traced, split into the finest calls that run alone, and each
    call that has no measurement in this environment is timed. What was timed
    is kept, whatever happens: run it again to go on. Points are placed while
    measuring, until the next ones are predicted well; --sweep quick and others
    measure a grid. On a GPU whole steps follow, which tell what compiled code,
    CUDA graphs and launching make of the sum.

    \b
    Examples:
      dooly profile smollm-135m
      dooly profile smollm-135m --sweep quick
      dooly profile Qwen/Qwen3-8B meta-llama/Llama-3.1-8B --backend FLASHINFER --db h200.db
      dooly profile Qwen/Qwen3-8B --confirm-from 0.25.1
      dooly profile Qwen/Qwen3-8B --execution-mode full_graph --step-layers 4 --step-layers 36
    """
    from dooly_backend.config import load_model, load_sweep
    from dooly_backend.database import Database

    if dry_run:
        ctx.invoke(
            plan,
            models=models,
            db=db,
            sweep_name=sweep_name,
            as_json=as_json,
            **engine_settings,
        )
        return
    sweep = load_sweep(sweep_name)
    for name in models:
        load_model(name)  # a misspelt second model shall not cost the first one's time
    for name in models:
        with (
            Database.open(db, create=True) as database,
            running_engine(_options(name, engine_settings)) as engine,
        ):
            from dooly_backend.profiling.confirm import source_of
            from dooly_backend.profiling.profiler import profile as run

            source = source_of(engine, database, confirm_from) if confirm_from else None
            with progress_bar(engine.configuration.model) as progress:
                result = run(
                    engine,
                    database,
                    sweep,
                    progress=progress,
                    confirm_from=source,
                    tolerance=tolerance / 100,
                )
            on_gpu = engine.environment.device_kind == "cuda"
            fewest = engine.num_layers
        steps = 0
        if on_gpu if whole_steps is None else whole_steps:
            from dooly_backend.profiling.stream_run import whole_steps as measure

            options = _options(name, engine_settings)
            steps = measure(options, Path(db), result.ids, fewest, step_layers)
        if as_json:
            console.print_json({**_summary(result, db), "whole_steps": steps})
        else:
            for line in _lines(result, db):
                click.echo(line)
            if steps:
                click.echo(f"whole steps: {steps} in {db}; `dooly db info` shows what they cost")


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@console.database_option
@console.engine_options
@console.sweep_option
@console.json_option
def plan(
    models: tuple[str, ...],
    db: str,
    engine_settings: dict[str, Any],
    sweep_name: str,
    as_json: bool,
) -> None:
    """Show what `dooly profile` would measure, without measuring.

    Several models count as if they were profiled one after the other: what an
    earlier one measures is known to a later one. The database need not exist.
    Of the adaptive sweep the number of points is the most that it may take.

    \b
    Examples:
      dooly plan smollm-135m
      dooly plan Qwen/Qwen3-8B meta-llama/Meta-Llama-3-8B --json
    """
    from dooly_backend.config import load_model, load_sweep
    from dooly_backend.database import Database

    sweep = load_sweep(sweep_name)
    for name in models:
        load_model(name)
    with ExitStack() as stack:
        database = None
        if Path(db).exists() or db.startswith("builtin:"):
            database = stack.enter_context(Database.open(db, read_only=True))
        from dooly_backend.profiling.plan import Known
        from dooly_backend.profiling.plan import plan as make

        known = Known(database)
        for name in models:
            with running_engine(_options(name, engine_settings)) as engine:
                result = make(engine, known, sweep)
            if as_json:
                console.print_json(_plan_summary(result))
            else:
                console.show(_plan_table(result))


def _plan_summary(result: Plan) -> dict[str, Any]:
    return {
        "model": result.configuration.model,
        "occurrences": result.occurrences,
        "signatures": len(result.signatures),
        "known": result.known,
        "new": result.new,
        "points": result.points,
        "at_most": result.at_most,
        "expected_seconds": round(result.expected_seconds, 1),
    }


def _plan_table(result: Plan) -> Table:
    from rich.table import Table

    configuration = result.configuration
    most = "at most " if result.at_most else ""
    where = f"{configuration.backend}, TP {configuration.tensor_parallel}"
    table = Table(
        "signature",
        "call",
        "depends on",
        "runs",
        "to measure",
        "known from",
        title=f"{configuration.model} on {where}",
        caption=(
            f"{result.occurrences} calls in a step, {len(result.signatures)} signatures: "
            f"{result.known} known, {result.new} new; "
            f"{most}{result.points} points, {most or 'about '}{result.expected_seconds:.0f} s"
        ),
        title_justify="left",
        caption_justify="left",
    )
    for planned in result.signatures:
        missing = f"{most}{planned.missing} of {planned.points}" if planned.missing else "nothing"
        table.add_row(
            planned.signature.hash[:12],
            f"{planned.signature.name} ({', '.join(p or 'model' for p in planned.paths)})",
            planned.signature.kind,
            str(planned.count),
            missing,
            ", ".join(planned.known_from) or "-",
        )
    return table


def _summary(result: ProfileResult, db: str) -> dict[str, Any]:
    confirmation = result.confirmation
    return {
        "model": result.model,
        "db": db,
        "operations": result.operations,
        "occurrences": result.occurrences,
        "signatures_known": result.signatures_known,
        "signatures_new": result.signatures_new,
        "points": result.points,
        "skipped": result.skipped,
        "unstable": result.unstable,
        "seconds": round(result.seconds, 3),
        "label_accuracy": result.trace.check.accuracy,
        "reused": {r.signature.hash: list(r.models) for r in result.reused},
        "reasons": {reason: list(keys) for reason, keys in result.reasons.items()},
        "confirmed": len(confirmation.confirmed) if confirmation else 0,
        "changed": [signature.hash for signature in confirmation.changed] if confirmation else [],
        "inherited": confirmation.points if confirmation else 0,
        "session_scatter": round(confirmation.scatter, 4) if confirmation else None,
    }


def _lines(result: ProfileResult, db: str) -> Iterator[str]:
    from dooly_backend.profiling.reuse import confirmed_lines, reused_lines, skipped_lines

    yield (
        f"{result.model}: {result.operations} operations traced, "
        f"{result.occurrences} calls in a step of the whole model"
    )
    known, new = result.signatures_known, result.signatures_new
    yield f"signatures: {known} known, {new} new"
    yield from reused_lines(result.reused)
    if result.confirmation is not None:
        yield from confirmed_lines(result.confirmation)
    yield from skipped_lines(result.reasons)
    if result.points or result.skipped:
        yield (
            f"measured {result.points} points in {result.seconds:.0f} s into {db}"
            f" ({result.unstable} unstable, {result.skipped} skipped)"
        )
    else:
        yield f"nothing to measure: {db} knows all of this sweep in this environment"


def _options(model: str, settings: dict[str, Any]) -> RunOptions:
    from dooly_backend.config import RunOptions, load_model

    return RunOptions.checked(model=load_model(model), **settings)


@contextmanager
def running_engine(
    options: RunOptions, before_device: Callable[[], object] = lambda: None
) -> Iterator[Engine]:
    """The engine that `options` describe, closed at the end; says on stderr what it does."""
    with console.log().status(f"starting {options.engine} with {options.model.name}"):
        from dooly_backend.engines import boot

        engine = boot(options, before_device)
    with engine:
        yield engine


class _Bar:
    """A progress bar with an ETA on stderr, one line a phase."""

    def __init__(self, progress: Any, title: str) -> None:
        self._progress = progress
        self._title = title
        self._task: Any = None

    def phase(self, name: str, total: int | None = None) -> None:
        self.done()
        self._task = self._progress.add_task(f"{self._title}: {name}", total=total)

    def done(self) -> None:
        """Mark the phase complete, also one whose length was not known."""
        if self._task is not None:
            total = self._progress.tasks[self._task].total or 1
            self._progress.update(self._task, total=total, completed=total)

    def advance(self, points: int = 1) -> None:
        self._progress.advance(self._task, points)


@contextmanager
def progress_bar(title: str) -> Iterator[_Bar]:
    """Progress of a profile of the model `title`, with an ETA, on stderr."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console.log(), transient=not os.isatty(2)) as progress:
        bar = _Bar(progress, title.rpartition("/")[2])
        yield bar
        bar.done()
