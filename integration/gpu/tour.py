"""All that engines of full depth can tell, on one start of each: a plan for one device.

    python -m integration.gpu.tour run integration/gpu/tours/r7b.yaml --db h200.db --out results

An engine takes a minute or two to start, and each thing that is measured on it less.
So here one engine goes through several turns: ``steps`` (whole steps into the database, as
`integration.gpu.step_costs` measures them; another such turn adds its samples),
``held-out`` (its others, into a file), ``serve`` (its workloads, as
`integration.live_vllm.run` serves them), ``batches`` (one round of
`integration.per_batch.measure`, as far as the engine takes them) and ``launches`` (what
`integration.gpu.launching` asks). The engines of a wave share the device: all have their
first turn before any has its second, so that what is measured again is measured minutes
later. Meanwhile the next wave's processes import and work out their configuration.
Everything is written as soon as it is measured.

With --hold the launching thread has the processor that is the quickest ahead of each batch, or
served workload, for itself (`integration.gpu.processors`): on a shared host launches take the
same from turn to turn then.

A plan is YAML: a list of waves, each a list of engines with ``configuration``
(MODEL:BACKEND[:MODE[:PRECISION]], profiled into the database before if it is to be fitted),
``turns`` and ``workloads``, and how often to ``rehearse`` these ahead of the first that is
kept: a mixture of experts compiles kernels meanwhile. With two devices run a plan on each
(`CUDA_VISIBLE_DEVICES`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import click
import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from dooly_backend.config import RunOptions
from dooly_backend.database import Database
from dooly_backend.engines import Engine
from integration.gpu import launching
from integration.gpu.processors import ANYWHERE, Where, held_if
from integration.gpu.step_costs import host_of, measure, measure_held_out, options_of
from integration.gpu.workers import Wave, ready

Turn = Literal["steps", "held-out", "serve", "batches", "launches"]
HOLD = "The launching thread alone on the processor that is the quickest ahead of each batch."
_LEAST_SECONDS = 60  # an engine takes about that long to start


class Planned(BaseModel):
    """One engine, and what it does in its turns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    configuration: str
    turns: tuple[Turn, ...] = ("steps",)
    workloads: tuple[str, ...] = ()
    rehearse: int = 0

    @property
    def name(self) -> str:
        """As the files are called."""
        return self.configuration.rpartition("/")[2].replace(":", "-")

    def command(self, options: Sequence[str]) -> list[str]:
        """The arguments of `python -m`."""
        command = ["integration.gpu.tour", "one", self.configuration, *options]
        command += [word for turn in self.turns for word in ("--turn", turn)]
        command += [word for text in self.workloads for word in ("--workload", text)]
        return command + (["--rehearse", str(self.rehearse)] if self.rehearse else [])


def load_plan(path: Path) -> list[list[Planned]]:
    """The waves of a plan. Raises UsageError for a file that is none."""
    try:
        waves = TypeAdapter(list[list[Planned]]).validate_python(yaml.safe_load(path.read_text()))
    except (OSError, yaml.YAMLError, ValidationError) as error:
        raise click.UsageError(f"{path} is no plan: {error}") from error
    lacking = [each.configuration for wave in waves for each in wave if _serves_nothing(each)]
    if lacking:
        raise click.UsageError(f"{path}: {', '.join(lacking)} shall serve and has no workloads")
    return waves


def _serves_nothing(planned: Planned) -> bool:
    return "serve" in planned.turns and not planned.workloads


@click.group()
def cli() -> None:
    """Several measurements on one start of an engine."""


def _settings(function: Any) -> Any:
    """What both commands take, and the first hands to the second."""
    for option in (
        click.option("--db", required=True, type=click.Path(path_type=Path)),
        click.option("--out", required=True, type=click.Path(path_type=Path)),
        click.option("--layers", type=int, help="As many as the model has by default."),
        click.option("--max-num-seqs", default=256, show_default=True),
        click.option("--max-num-batched-tokens", default=8192, show_default=True),
        click.option("--threads", type=int, help="Of an engine on a CPU."),
        click.option("--hold/--no-hold", default=False, help=HOLD),
    ):
        function = option(function)
    return function


@cli.command(name="run")
@click.argument("plan", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--budget", default=540.0, show_default=True, help="Seconds for everything.")
@_settings
def run_all(plan: Path, budget: float, out: Path, **settings: Any) -> None:
    """Go through the waves of PLAN."""
    waves = load_plan(plan)
    out.mkdir(parents=True, exist_ok=True)
    options = ["--out", str(out)]
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            options += [f"--{option}"] if value else []
        else:
            options += [] if value is None else [f"--{option}", str(value)]
    end = time.monotonic() + budget
    failed = False
    for planned, code in codes(waves, options, end):
        click.echo(json.dumps({"configuration": planned.configuration, "exit": code}))
        failed |= bool(code)
    sys.exit(int(failed))


def codes(
    waves: Sequence[Sequence[Planned]], options: Sequence[str], end: float
) -> Iterator[tuple[Planned, int | None]]:
    """Run the waves; each engine and its exit code, None where no time was left to start it."""
    left = list(waves)

    def start() -> Wave | None:
        if not left or end - time.monotonic() < _LEAST_SECONDS:
            return None
        return Wave([planned.command(options) for planned in left[0]])

    upcoming = start()
    while upcoming is not None:
        wave, planned, upcoming = upcoming, left.pop(0), None

        def prepare() -> None:
            nonlocal upcoming
            upcoming = start()

        try:
            ended = wave.run(
                max(end - time.monotonic(), 0.0),
                turns=max(len(each.turns) for each in planned),
                started=prepare,
                staged=True,
            )
        except BaseException:
            wave.kill()
            if upcoming is not None:
                upcoming.kill()
            raise
        yield from zip(planned, ended, strict=True)
        upcoming = upcoming or start()
    for each in (each for wave in left for each in wave):
        click.echo(f"{each.configuration}: not run, {end - time.monotonic():.0f} s left", err=True)
        yield each, None


@cli.command()
@click.argument("configuration")
@click.option("--turn", "turns", multiple=True, type=click.Choice(get_args(Turn)))
@click.option("--workload", "workloads", multiple=True)
@click.option("--rehearse", default=0)
@_settings
def one(
    configuration: str,
    turns: tuple[Turn, ...],
    workloads: tuple[str, ...],
    rehearse: int,
    db: Path,
    out: Path,
    layers: int | None,
    hold: bool,
    **limits: Any,
) -> None:
    """One engine: wait until the device is free, then for each turn."""
    from dooly_backend.engines import boot

    planned = Planned(
        configuration=configuration, turns=turns, workloads=workloads, rehearse=rehearse
    )
    options = options_of(configuration, **limits)
    options = options.model_copy(update={"layers": layers or options.model.num_layers})
    start = time.monotonic()
    with boot(options, ready) as engine:
        click.echo(f"{configuration}: started in {time.monotonic() - start:.0f} s", err=True)
        done: dict[str, int] = {}  # how often each turn was taken
        for turn in turns:
            ready()
            start = time.monotonic()
            with held_if(hold) as where:
                told = take(turn, done.get(turn, 0), engine, planned, options, db, out, where)
            done[turn] = done.get(turn, 0) + 1
            seconds = round(time.monotonic() - start, 1)
            click.echo(
                json.dumps({**told, **where.about, "turn": turn, "seconds": seconds}), err=True
            )
    if "steps" in turns:
        with Database.open(db) as database, held_if(hold):
            host_of(engine, database)


def take(
    turn: Turn,
    times: int,
    engine: Engine,
    planned: Planned,
    options: RunOptions,
    db: Path,
    out: Path,
    where: Where = ANYWHERE,
) -> dict[str, Any]:
    """Take a turn, the `times`-th of its kind from 0; what it did."""
    from integration.per_batch import measure as batches
    from integration.per_batch.batches import BATCHES

    if turn == "steps":
        return measure(engine, options, db, again=times > 0, where=where)
    if turn == "held-out":
        return measure_held_out(engine, planned.configuration, options, out, where)
    if turn == "serve":
        return {"runs": list(serve(engine, planned, times, out, where))}
    if turn == "launches":
        who = {"configuration": planned.configuration, "round": times}
        path = out / f"launches-{planned.name}.jsonl"
        return {"launches": launching.measure(engine, path, who)}
    about = batches.about_of(engine) | {
        "mode": options.execution_mode,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
    }
    fitting = [batch for batch in BATCHES if batch.num_tokens <= engine.max_num_tokens]
    path = out / f"per-batch-{planned.name}.jsonl"
    return {
        "configuration": planned.configuration,
        "round": times,
        "batches": batches.measure(engine, path, about, times, fitting, where),
    }


def serve(
    engine: Engine, planned: Planned, times: int, out: Path, where: Where = ANYWHERE
) -> Iterator[dict[str, Any]]:
    """Serve the workloads that have no file of this round yet; what each run was."""
    from dooly_backend.engines.vllm_serving import VllmServer
    from dooly_backend.simulation import live
    from dooly_backend.simulation.run_file import save_run
    from dooly_backend.simulation.workload import load_workload
    from integration.live_vllm.run import summary

    with VllmServer.of(engine) as server:
        for number, text in enumerate(planned.workloads, times * len(planned.workloads)):
            path = out / f"live-{planned.name}-{number}.json.xz"
            if path.exists():
                continue
            workload = load_workload(text)
            if not times:
                live.warm_up(server, workload.build())
                for _ in range(planned.rehearse):
                    live.serve(server, workload.build(), concurrency=workload.concurrency)
            where.again()
            run = live.serve(server, workload.build(), concurrency=workload.concurrency)
            run.about.update(workload=text, **where.about)
            save_run(run, path)
            yield {"file": path.name, "workload": text, **summary(run)}


if __name__ == "__main__":
    cli()
