"""Does every kernel of the live forward pass lie under exactly one entry of the runnable set?

    python -m integration.gpu.coverage run -o coverage.json --budget 300 \
        meta-llama/Llama-3.1-8B:FLASH_ATTN meta-llama/Llama-3.1-8B:FLASHINFER ...
    python -m integration.gpu.coverage one MODEL BACKEND -o coverage.json

Live steps (prefills, decodes, both) run under torch's profiler, with a range
around every call that the runnable set measures. Every kernel, copy and fill of
the device is joined to the call that launched it, so that Triton's kernels,
which no dispatcher sees, count like all others. The same step runs before
without ranges: that their kernels are the same shows that the ranges change
nothing. On a CPU the operations that call no other are counted instead. The
file has one row for each model, backend, mode and device; what was there of the
same is replaced.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from dooly_backend.config import RunOptions, load_model
from dooly_backend.engines import Engine, boot
from dooly_backend.errors import DoolyError, EngineError
from dooly_backend.operations.runnable import Entry, resolve
from dooly_backend.tracing.trace import LAUNCHED
from dooly_backend.tracing.tracer import trace_model
from dooly_backend.workload import Batch
from integration.gpu.covering import by_name, cover_of, difference, report
from integration.gpu.launches import device_work, events, host_work
from integration.gpu.workers import in_turn, ready

BATCHES = (
    Batch.prefill(16),
    Batch.prefill(1024),
    Batch.prefill(128, count=4),
    Batch.decode(1, 1000),
    Batch.decode(32, 600),
    Batch.decode(4, 6000),
    Batch.prefill(300) + Batch.decode(16, 500),
)


@click.group()
def cli() -> None:
    """Which entry of the runnable set each kernel of a live step lies under."""


@cli.command()
@click.argument("configurations", nargs=-1, required=True, metavar="MODEL:BACKEND[:MODE]...")
@click.option("--layers", default=4, show_default=True)
@click.option("--budget", default=300.0, show_default=True, help="Seconds for everything.")
@click.option("--traces", type=click.Path(path_type=Path), help="Keep the traces there.")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
def run(
    configurations: tuple[str, ...], layers: int, budget: float, traces: Path | None, out: Path
) -> None:
    """Every configuration in a process of its own: they start together, and run in turn."""
    options = ["--layers", str(layers), "--out", str(out), "--wait"]
    if traces is not None:
        options += ["--traces", str(traces)]
    commands = [
        ["integration.gpu.coverage", "one", *configuration.split(":"), *options]
        for configuration in configurations
    ]
    codes = in_turn(commands, budget)
    if any(codes):
        sys.exit(f"exit codes: {dict(zip(configurations, codes, strict=True))}")


@cli.command()
@click.argument("model")
@click.argument("backend")
@click.argument("mode", default="eager")
@click.option("--layers", default=4, show_default=True)
@click.option("--traces", type=click.Path(path_type=Path), help="Keep the traces there.")
@click.option("--wait", is_flag=True, help="Start the engine, then wait for a line on stdin.")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
def one(
    model: str, backend: str, mode: Any, layers: int, traces: Path | None, wait: bool, out: Path
) -> None:
    """One configuration."""
    options = RunOptions(
        model=load_model(model),
        backend=backend,
        layers=layers,
        execution_mode=mode,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
    )
    with boot(options) as engine:
        if wait:
            ready()
        trace = trace_model(engine)
        # By operation where one runs alone, as on a GPU: also a CPU's run checks that then.
        entries = resolve(trace, engine, prefer_operations=True).entries
        about = {
            "model": options.model.name,
            "backend": engine.configuration.backend,
            "mode": mode,
            "device": engine.environment.device,
            "engine": f"{engine.environment.engine} {engine.environment.engine_version}",
            "layers": layers,
            "unit": "kernels" if engine.environment.device_kind == "cuda" else "operations",
            "entries": len(entries),
            "modules": sum(entry.granularity == "module" for entry in entries),
            "launched": launched(entries),
        }
        for path, kernels in about["launched"].items():
            click.echo(f"{path} is whole: it launches {', '.join(kernels)} itself", err=True)
        on_device = about["unit"] == "kernels"
        # The first profile of a process waits for CUPTI, and may miss what runs meanwhile.
        profiled(engine, engine.synchronize, nullcontext, on_device)
        rows: list[dict[str, Any]] = []
        for batch in BATCHES:
            try:
                rows.append(covered_step(engine, entries, batch, traces))
            except EngineError as error:
                click.echo(f"{batch.key}: {error}", err=True)
                continue
            click.echo(line(about, rows[-1]))
            merge(out, {**about, "batches": rows})  # a killed run leaves what it has


def launched(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """By module, the kernels that it launches past the dispatcher: why it stays whole."""
    names = {
        entry.path: [op.name.removeprefix(LAUNCHED) for op in entry.operations if op.is_launch]
        for entry in entries
    }
    return {path: found for path, found in names.items() if found}


def line(about: dict[str, Any], row: dict[str, Any]) -> str:
    """One batch, to read."""
    outside = ", ".join(f"{part} {of['count']}" for part, of in row["outside"].items())
    same = "" if row["ranges_change"] == {} else f"; ranges change {row['ranges_change']}"
    return (
        f"{about['model']} {about['backend']} {about['mode']} {row['batch']}: "
        f"{row['once']['count']} of {row['inside']['count']} {about['unit']} under one entry "
        f"({row['once']['us']:.0f} of {row['inside']['us']:.0f} us), "
        f"{row['gaps']['count']} under none, {row['doubles']['count']} under several; "
        f"outside: {outside}{same}"
    )


def covered_step(
    engine: Engine, entries: Sequence[Entry], batch: Batch, traces: Path | None
) -> dict[str, Any]:
    """How `entries` cover one live step of `batch`. Raises EngineError where it does not fit."""
    from integration.gpu.ranges import EntryRanges

    on_device = engine.environment.device_kind == "cuda"
    taken: list[dict[str, Any]] = []
    around: list[Callable[[], AbstractContextManager[None]]] = [
        nullcontext,
        EntryRanges(engine, entries).active,
    ]

    def run(step: Callable[[], None]) -> None:
        taken.append(profiled(engine, step, around[len(taken)], on_device))

    engine.live_steps(batch, len(around), run)
    bare, ranged = taken
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        configuration = engine.configuration
        name = f"{configuration.model.rpartition('/')[2]}-{configuration.backend}-{batch.key}"
        with gzip.open(traces / f"{name}.json.gz", "wt") as file:
            json.dump(ranged, file)
    work = device_work if on_device else host_work
    cover = cover_of(ranged, len(entries), on_device)
    everything = [*cover.inside, *(w for of in cover.outside.values() for w in of)]
    phase = (
        "mixed" if batch.prefills and batch.decodes else "decode" if batch.decodes else "prefill"
    )
    return {
        "batch": batch.key,
        "phase": phase,
        **report(cover),
        "ranges_change": difference(everything, work(events(bare))),
        "longest": by_name(cover.inside)[:8],
    }


def profiled(
    engine: Engine,
    step: Callable[[], None],
    around: Callable[[], AbstractContextManager[None]],
    on_device: bool,
) -> dict[str, Any]:
    """The trace of one step, run inside `around`."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if on_device:
        activities.append(ProfilerActivity.CUDA)
    engine.synchronize()
    with profile(activities=activities) as profiler:
        with around():
            step()
        engine.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        loaded: dict[str, Any] = json.loads(path.read_text())
        return loaded


def merge(path: Path, configuration: dict[str, Any]) -> None:
    """Add a configuration to the file, in the place of an earlier run of the same."""

    def identity(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("model", "backend", "mode", "device"))

    rows = json.loads(path.read_text()) if path.is_file() else []
    rows = [row for row in rows if identity(row) != identity(configuration)]
    rows.append(configuration)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    try:
        cli()
    except DoolyError as error:
        sys.exit(f"error: {error}")
