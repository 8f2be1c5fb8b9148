"""Measure what steps cost at the engine's defaults, for several configurations, within a budget.

    python -m integration.gpu.step_costs run --db h200.db --out results --budget 540 \
        meta-llama/Llama-3.1-8B:FLASH_ATTN:full_graph Qwen/Qwen3-30B-A3B:FLASH_ATTN:full_graph

Each configuration must have been profiled into the database (`integration.gpu.run`),
which says how much memory an engine takes. Every depth of every configuration is
an engine in a process of its own; on every GPU of the host as many start together as it
holds, and they measure in turn: whole steps for the fit into the database, those of
`integration.gpu.steps` (held out) into ``OUT/steps-MODEL-BACKEND-MODE.jsonl``, then,
without an engine, the scheduler's part. What is there already is not measured again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click

from dooly_backend.config import RunOptions, load_model
from dooly_backend.database import Database
from dooly_backend.database.records import ENGINE_QUANTIZATION, Configuration
from dooly_backend.engines import Engine
from dooly_backend.errors import InputError
from dooly_backend.profiling.clock import measure_clock
from dooly_backend.workload import Batch
from integration.gpu.processors import ANYWHERE, Where
from integration.gpu.run import precision_options
from integration.gpu.steps import BATCHES, rows
from integration.gpu.workers import devices, in_turn_on_each, ready

_ROOM = 0.92  # of the device
_LEAST_SECONDS = 60  # an engine takes about that long to start


@dataclass(frozen=True)
class Job:
    """One engine: a configuration at a depth, and how much of the device it takes."""

    configuration: str  # MODEL:BACKEND:MODE
    depth: int
    device_share: float


@click.group()
def cli() -> None:
    """Measure what steps cost."""


@cli.command(name="run")
@click.argument(
    "configurations", nargs=-1, required=True, metavar="MODEL:BACKEND[:MODE[:PRECISION]]..."
)
@click.option("--db", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--budget", default=540.0, show_default=True, help="Seconds for everything.")
@click.option(
    "--depth",
    "depths",
    multiple=True,
    type=int,
    default=(4, 0),
    show_default=True,
    help="Layers, once for every depth; 0: as many as fit.",
)
@click.option("--held-out/--no-held-out", default=True, show_default=True)
@click.option("--clock", multiple=True, metavar="CONFIGURATION", help="Watch the clock in it, too.")
def run_all(
    configurations: tuple[str, ...],
    db: Path,
    out: Path,
    budget: float,
    depths: tuple[int, ...],
    held_out: bool,
    clock: tuple[str, ...],
) -> None:
    """Start the engines, wave after wave, and measure; then fit."""
    from dooly_backend.regression.select import UnmeasuredError
    from dooly_backend.regression.store_cost import store_stream_cost

    end = time.monotonic() + budget
    out.mkdir(parents=True, exist_ok=True)
    with Database.open(db) as database:
        jobs = [job for each in configurations for job in jobs_of(database, each, depths)]
    failed = False
    gpus = devices() or [None]
    wanted = waves(jobs)
    for several in (wanted[i : i + len(gpus)] for i in range(0, len(wanted), len(gpus))):
        left = end - time.monotonic()
        if left < _LEAST_SECONDS:
            jobs_left = ", ".join(str(job) for wave in several for job in wave)
            click.echo(f"{left:.0f} s left, not run: {jobs_left}", err=True)
            failed = True
            continue
        shares = dict(zip(gpus, several, strict=False))
        commands = {
            gpu: [
                ["integration.gpu.step_costs", "one", job.configuration, "--depth", str(job.depth)]
                + ["--db", str(db), "--out", str(out)]
                + ([] if held_out else ["--no-held-out"])
                + (["--clock"] if job.configuration in clock else [])
                for job in wave
            ]
            for gpu, wave in shares.items()
        }
        for gpu, codes in in_turn_on_each(commands, left).items():
            for job, code in zip(shares[gpu], codes, strict=True):
                done = {"configuration": job.configuration, "layers": job.depth, "exit": code}
                click.echo(json.dumps(done | {"device": gpu}))
                failed |= bool(code)
    with Database.open(db) as database:
        places = product(database.configurations(), database.environments())
        for place in places:
            try:
                for cost in store_stream_cost(database, place):
                    click.echo(json.dumps({"configuration": place[0], **asdict(cost)}))
            except UnmeasuredError as error:
                click.echo(f"not fitted: {error}", err=True)
                failed = True
    sys.exit(int(failed))


def jobs_of(database: Database, configuration: str, depths: Sequence[int]) -> list[Job]:
    """The engines that a configuration needs. Raises InputError where it was not profiled."""
    from dooly_backend.profiling.stream import deepest, engine_bytes

    wanted = options_of(configuration)
    for i, known in database.configurations().items():
        if not _is_profile_of(known, wanted):
            continue
        for environment_id, environment in database.environments().items():
            capacity = database.kv_capacity(i, environment_id)
            if capacity is None:
                continue
            on_gpu = environment.device_kind == "cuda"
            most = deepest(capacity, known, on_gpu)
            chosen = sorted({min(depth or most, most) for depth in depths})
            return [
                Job(
                    configuration,
                    depth,
                    engine_bytes(capacity, known, depth, on_gpu) / capacity.device_bytes,
                )
                for depth in chosen
            ]
    raise InputError(
        f"{database.path} has no profile of {configuration}: run integration.gpu.run first"
    )


def waves(jobs: Iterable[Job]) -> list[list[Job]]:
    """Jobs that fit into the device together, in their order."""
    found: list[list[Job]] = []
    taken = 1.0
    for job in jobs:
        if taken + job.device_share > _ROOM:
            found.append([])
            taken = 0.0
        found[-1].append(job)
        taken += job.device_share
    return found


def options_of(configuration: str, **more: Any) -> RunOptions:
    """What ``MODEL:BACKEND[:MODE[:PRECISION]]`` means; the mode is full_graph by default."""
    model, backend, *rest = configuration.split(":")
    mode: Any = rest[0] if rest else "full_graph"
    more |= precision_options(rest[1] if len(rest) > 1 else "")
    return RunOptions(
        model=load_model(model),
        backend=backend,
        execution_mode=mode,
        compiled=mode != "eager",
        **more,
    )


def _is_profile_of(known: Configuration, wanted: RunOptions) -> bool:
    served = known.model, known.backend, known.execution_mode, known.kv_cache_dtype
    asked = wanted.model.name, wanted.backend, wanted.execution_mode, wanted.kv_cache_dtype
    by_engine = known.hf_config.get(ENGINE_QUANTIZATION)
    return served == asked and by_engine == wanted.quantization


@cli.command()
@click.argument("configuration")
@click.option("--db", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--depth", required=True, type=int)
@click.option("--held-out/--no-held-out", default=True)
@click.option("--clock/--no-clock", default=False)
@click.option("--max-num-seqs", default=256)
@click.option("--max-num-batched-tokens", default=8192)
def one(
    configuration: str,
    db: Path,
    out: Path,
    depth: int,
    held_out: bool,
    clock: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> None:
    """One engine: wait for its turn, then measure."""
    from dooly_backend.engines import boot

    options = options_of(
        configuration,
        layers=depth,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    start = time.monotonic()
    with boot(options) as engine:
        click.echo(f"{configuration}, {depth} layers: {time.monotonic() - start:.0f} s", err=True)
        ready()
        told = measure(engine, options, db, clock)
        if held_out:
            told |= measure_held_out(engine, configuration, options, out)
    with Database.open(db) as database:
        told["host"] = host_of(engine, database)
    click.echo(json.dumps(told))


def measure(
    engine: Engine,
    options: RunOptions,
    db: Path,
    clock: bool = False,
    again: bool = False,
    where: Where = ANYWHERE,
) -> dict[str, Any]:
    """Whole steps of a booted engine into the database; what was measured, and how much of it.

    With `again` those that are known, too: their samples are added. A held thread goes to
    the quickest processor before every batch.
    """
    from dooly_backend.profiling.stream import measure_stream, place_of

    with Database.open(db, create=True) as database:
        done = measure_stream(engine, database, again=again, ahead=where.again)
        for batch, reason in done.reasons.items():
            click.echo(f"{batch}: {reason}", err=True)
        told: dict[str, Any] = {"known": done.known, "measured": done.measured}
        if clock:
            told["clock"] = _clock(engine, database, place_of(engine, database))
    return {**_about(engine, options), **told}


def measure_held_out(
    engine: Engine, configuration: str, options: RunOptions, out: Path, where: Where = ANYWHERE
) -> dict[str, Any]:
    """The steps that no fit sees into a file in `out`; how many it lacked."""
    name = configuration.rpartition("/")[2].replace(":", "-")
    about = _about(engine, options)
    return {**about, "held_out": _held_out(engine, out / f"steps-{name}.jsonl", about, where)}


def _about(engine: Engine, options: RunOptions) -> dict[str, Any]:
    return {
        "model": options.model.name,
        "backend": options.backend,
        "mode": options.execution_mode,
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "layers": engine.num_layers,
    }


def host_of(engine: Engine, database: Database) -> int:
    """Measure the scheduler's part of the steps of an engine that is closed; how many sizes."""
    from dooly_backend.profiling.host import measure_host
    from dooly_backend.profiling.stream import place_of

    return measure_host(database, place_of(engine, database), engine.max_num_reqs)


def _clock(engine: Engine, database: Database, ids: tuple[int, int]) -> int:
    """Watch the clock, unless it was watched at this depth; how many steps."""
    known = {step.num_layers for step in database.clock_steps(*ids)}
    if engine.num_layers in known:
        return 0
    steps = measure_clock(engine)
    database.record_clock(*ids, steps)
    return len(steps)


def _held_out(engine: Any, path: Path, about: Mapping[str, Any], where: Where) -> int:
    """Measure `BATCHES` that the file lacks at this depth; how many."""
    known = set()
    if path.exists():
        lines = map(json.loads, path.read_text().splitlines())
        known = {row["batch"] for row in lines if about.items() <= row.items()}
    missing: list[Batch] = [batch for batch in BATCHES if batch.key not in known]
    count = 0
    with path.open("a") as file:
        for row in rows(engine, 20, batches=missing, where=where):
            file.write(json.dumps({**about, "round": 0, **row}) + "\n")
            file.flush()
            count += 1
    return count


if __name__ == "__main__":
    cli()
