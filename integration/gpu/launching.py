"""Why a launch takes as long as it does: processor time against waiting, place by place.

    python -m integration.gpu.tour run PLAN ...       # a turn `launches` of an engine
    python -m integration.gpu.launching results/launches-*.jsonl

The same step is launched in a row of its like, as the profiler measures it, among decodes, and
by the engine's own scheduler; each with the launching thread wherever the system puts it and
held on one processor. Of every launch the file has its wall time, the time that its thread
ran, the processor it ended on, and how often it gave the processor up or lost it. Where the
two times are equal the processor is slow (a neighbour on its core, a lower clock); where the
wall time is longer, something was waited for. `others` is what the host's other processors
did meanwhile, and `stolen` what the hypervisor gave to somebody else.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from dooly_backend.engines import Engine
from dooly_backend.errors import EngineError
from dooly_backend.profiling.timer import quiet_process
from dooly_backend.workload import Batch
from integration.accuracy.tables import table
from integration.gpu.processors import held_on
from integration.gpu.steps import read_rows

_DECODES = Batch.decode(8, 1000)
#: One of every way to launch: a whole graph, pieces, none.
_FRESH = {"full": None, "piecewise": Batch.prefill(200), "eager": Batch.prefill(700)}
_ROW, _CYCLES, _BETWEEN = 24, 8, 20
_SERVED = {
    "piecewise": "fixed:prompt=200,output=60,requests=24,rate=8",
    "eager": "fixed:prompt=700,output=60,requests=24,rate=8",
}
_CALLS = ("execute_model", "sample_tokens")  # of a model runner; together they launch a step


@dataclass(frozen=True)
class Launch:
    """One launch of a step of so many new tokens; times in microseconds of the thread."""

    tokens: int
    wall_us: float
    cpu_us: float
    processor: int
    gave_up: int  # voluntary and involuntary switches of the thread
    lost: int


@contextmanager
def watched(runner: Any) -> Iterator[list[Launch]]:
    """Every launch of a step by vLLM's model `runner` within the block.

    A runner that computes while it launches (a CPU's) is watched all the same.
    """
    found: list[Launch] = []
    pending: list[tuple[int, float, float, tuple[int, int]]] = []

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == _CALLS[0]:
                tokens = int(args[0].total_num_scheduled_tokens)
                pending[:] = [(tokens, time.perf_counter(), time.thread_time(), _switches())]
            output = function(*args, **kwargs)
            if pending and pending[0][0] and (name == _CALLS[1] or output is not None):
                tokens, wall, cpu, switches = pending.pop()
                spent = time.perf_counter() - wall, time.thread_time() - cpu
                gave_up, lost = (b - a for a, b in zip(switches, _switches(), strict=True))
                wall_us, cpu_us = (round(s * 1e6, 1) for s in spent)
                found.append(Launch(tokens, wall_us, cpu_us, _processor(), gave_up, lost))
            return output

        return call

    originals = {name: getattr(runner, name) for name in _CALLS}
    for name, function in originals.items():
        setattr(runner, name, wrap(name, function))
    try:
        yield found
    finally:
        for name in originals:
            delattr(runner, name)


def measure(engine: Engine, path: Path, about: dict[str, Any]) -> int:
    """Launches in every pattern, held on a processor and not, as lines of `path`; how many."""
    from dooly_backend.engines.vllm_serving import VllmServer
    from dooly_backend.simulation import live
    from dooly_backend.simulation.workload import load_workload

    runner = engine.core.model_executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]
    count = 0

    def keep(kind: str, pattern: str, held: int | None, run: Callable[[], Any]) -> None:
        nonlocal count
        with held_on(held), watched(runner) as launches:
            before = processor_times()
            run()
            told = {**about, "kind": kind, "pattern": pattern, "held_on": held}
            told |= shares(before, processor_times())
        with path.open("a") as file:
            for launch in launches:
                file.write(json.dumps({**told, **asdict(launch)}) + "\n")
        count += len(launches)

    processors = sorted(os.sched_getaffinity(0))
    for held in (None, processors[0], processors[len(processors) // 2]):
        for kind, fresh in _FRESH.items():
            rows = {"in a row": [fresh] * _ROW}
            if fresh is not None:
                rows["among decodes"] = [fresh, *[None] * _BETWEEN] * _CYCLES
            for pattern, prefills in rows.items():
                decodes = None if fresh is not None and pattern == "in a row" else _DECODES
                with quiet_process():
                    keep(kind, pattern, held, partial(engine.pipelined_sequence, decodes, prefills))
        for kind, text in _SERVED.items():
            with VllmServer.of(engine) as server:  # type: ignore[arg-type]
                arrivals = load_workload(text).build()
                keep(kind, "served", held, partial(live.serve, server, arrivals))
    return count


def processor_times(stat: str | None = None) -> dict[str, int]:
    """Ticks since the start of the host, of all processors: busy, idle, stolen.

    Raises EngineError where the system tells none (`/proc/stat`).
    """
    try:
        text = Path("/proc/stat").read_text() if stat is None else stat
    except OSError as error:
        raise EngineError(f"this system does not tell what its processors do: {error}") from error
    user, nice, system, idle, waiting, irq, soft, stolen = map(int, text.split()[1:9])
    return {
        "busy": user + nice + system + irq + soft,
        "idle": idle + waiting,
        "stolen": stolen,
    }


def shares(before: dict[str, int], after: dict[str, int]) -> dict[str, float]:
    """How many processors were busy with anything, and how many were stolen, between the two."""
    spent = {name: after[name] - before[name] for name in before}
    ticks = max(sum(spent.values()), 1)
    each = (os.cpu_count() or 1) / ticks
    return {
        "busy": round(spent["busy"] * each, 2),
        "stolen": round(spent["stolen"] * each, 2),
    }


def _switches() -> tuple[int, int]:
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_nvcsw, used.ru_nivcsw


def _processor() -> int:
    """The processor that the calling thread runs on (field 39 of its stat)."""
    return int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])


def summary(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """By engine, kind, pattern and processor: quartiles of the launches of that kind, ms."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        # Beside a kind's own launches its file has those of the decodes between them.
        if (row["kind"] == "full") == (row["tokens"] <= _DECODES.num_tokens):
            key = row["configuration"], row["kind"], row["pattern"], row["held_on"]
            groups.setdefault(key, []).append(row)
    found = []
    for (configuration, kind, pattern, held), group in groups.items():
        low, middle, high = _quartiles([row["wall_us"] for row in group])
        waited = statistics.median(1 - row["cpu_us"] / row["wall_us"] for row in group)
        found.append(
            {
                "configuration": configuration, "kind": kind, "pattern": pattern,
                "held on": "-" if held is None else held, "launches": len(group),
                "low, ms": low / 1000, "median, ms": middle / 1000, "high, ms": high / 1000,
                "waiting": waited, "busy": group[0]["busy"], "stolen": group[0]["stolen"],
            }
        )  # fmt: skip
    return found


def _quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else list(values) * 3


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    """Quartiles of the launches in FILES, by pattern and processor."""
    rows = summary(read_rows(files))
    heads = list(rows[0]) if rows else []
    for line in table(heads, [[_shown(row[head]) for head in heads] for row in rows]):
        click.echo(line)


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
