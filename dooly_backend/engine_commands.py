"""`dooly trace` and `dooly profile`: the commands that start an engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dooly_backend import console

if TYPE_CHECKING:
    from dooly_backend.config import RunOptions
    from dooly_backend.engines import Engine
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
    from dooly_backend.tracing.render import render
    from dooly_backend.tracing.tracer import trace_model

    with running_engine(_options(model, engine_settings)) as engine:
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
@click.option(
    "--sweep",
    "sweep_name",
    metavar="NAME",
    default="quick",
    show_default=True,
    help="The workload points: a name in configs/sweeps, or a YAML file.",
)
@console.json_option
def profile(
    models: tuple[str, ...],
    db: str,
    engine_settings: dict[str, Any],
    sweep_name: str,
    as_json: bool,
) -> None:
    """Time a model's operations that the database does not know yet.

    The model is traced, split into the finest calls that run alone, and each
    call that has no measurement in this environment is timed. What was timed
    is kept, whatever happens: run it again to go on.

    \b
    Examples:
      dooly profile smollm-135m
      dooly profile Qwen/Qwen3-8B meta-llama/Llama-3.1-8B --backend FLASHINFER --db h200.db
    """
    from dooly_backend.config import load_model, load_sweep
    from dooly_backend.database import Database

    sweep = load_sweep(sweep_name)
    for name in models:
        load_model(name)  # a misspelt second model shall not cost the first one's time
    for name in models:
        with (
            Database.open(db, create=True) as database,
            running_engine(_options(name, engine_settings)) as engine,
        ):
            from dooly_backend.profiling.profiler import profile as run

            with progress_bar(engine.configuration.model) as progress:
                result = run(engine, database, sweep, progress=progress)
        if as_json:
            console.print_json(_summary(result, db))
        else:
            for line in _lines(result, db):
                click.echo(line)


def _summary(result: ProfileResult, db: str) -> dict[str, Any]:
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
    }


def _lines(result: ProfileResult, db: str) -> Iterator[str]:
    yield (
        f"{result.model}: {result.operations} operations traced, "
        f"{result.occurrences} calls in a step of the whole model"
    )
    known, new = result.signatures_known, result.signatures_new
    yield f"signatures: {known} known, {new} new"
    if result.points or result.skipped:
        yield (
            f"measured {result.points} points in {result.seconds:.0f} s into {db}"
            f" ({result.unstable} unstable, {result.skipped} skipped)"
        )
    else:
        yield f"nothing to measure: {db} knows every point of this sweep in this environment"


def _options(model: str, settings: dict[str, Any]) -> RunOptions:
    from dooly_backend.config import RunOptions, load_model

    return RunOptions.checked(model=load_model(model), **settings)


@contextmanager
def running_engine(options: RunOptions) -> Iterator[Engine]:
    """The engine that `options` describe, closed at the end; says on stderr what it does."""
    with console.log().status(f"starting {options.engine} with {options.model.name}"):
        from dooly_backend.engines import boot

        engine = boot(options)
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
