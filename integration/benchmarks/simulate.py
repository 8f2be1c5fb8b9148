"""How many requests a simulation takes per second, and where its time goes.

    python -m integration.benchmarks.simulate [--requests 10000] [-o simulate.json]

1024 tokens in, 128 out, 64 requests at a time (a closed loop), with step times
of the shipped H200 database for Llama-3.1-8B. The first run fills the timer's
tables, as a simulation's only run does; another one has them filled. No engine
and no torch are needed, but for --engine-requests. Seconds are those of the
clock, and `processor_s` the processor time of this process, which runs on one
core: where they differ the machine had other work.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dooly_backend import console
from dooly_backend.simulation import fast
from dooly_backend.simulation.log import Log
from dooly_backend.simulation.own_scheduler import Scheduler
from dooly_backend.simulation.records import Batches, ServingLimits, StepTimes
from dooly_backend.simulation.scheduler import simulate
from dooly_backend.simulation.source import from_database
from dooly_backend.simulation.workload import load_workload

MODEL = "meta-llama/Llama-3.1-8B"
LIMITS = ServingLimits(
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=8192,
    num_gpu_blocks=40_000,
    block_size=16,
)


@click.command(context_settings=console.CONTEXT_SETTINGS)
@click.option("--requests", default=10_000, show_default=True)
@click.option("--concurrency", default=64, show_default=True)
@click.option("--max-num-batched-tokens", "sizes", multiple=True, default=(8192, 2048))
@click.option("--sync/--async", "sync", default=None, help="[default: both]")
@click.option("--engine-requests", default=0, help="So many through vLLM's own scheduler, too.")
@console.output_option("A JSON file for the result.")
def main(
    requests: int,
    concurrency: int,
    sizes: tuple[int, ...],
    sync: bool | None,
    engine_requests: int,
    out: Path | None,
) -> None:
    """Time simulations of REQUESTS requests."""
    began = time.perf_counter()
    source = from_database("builtin:h200", MODEL, None, {"backend": "FLASH_ATTN"})
    spec = f"fixed:requests={requests},prompt=1024,output=128,concurrency={concurrency}"
    workload = load_workload(spec).build()
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "workload": spec,
        "model": MODEL,
        "fit_s": round(time.perf_counter() - began, 3),
    }
    for tokens in sizes:
        for waits in (True, False) if sync is None else (not sync,):
            name = f"{tokens} tokens a step, {'asynchronous' if waits else 'synchronous'}"
            limits = replace(LIMITS, max_num_batched_tokens=tokens, async_scheduling=waits)
            timer = Timed(source.timer(limits))
            with timed_parts() as parts:
                first, second = (one(workload, limits, timer, concurrency, parts) for _ in range(2))
            result[name] = {"first": first, "again": second}
    if engine_requests:
        timer = Timed(source.timer(LIMITS))
        some = workload[:engine_requests]
        simulate(some[:concurrency], LIMITS, timer, "engine", concurrency=concurrency)  # its import
        began = time.perf_counter()
        simulate(some, LIMITS, timer, "engine", concurrency=concurrency)
        seconds = time.perf_counter() - began
        result["vllm_scheduler"] = {
            "requests": engine_requests,
            "requests_per_s": round(engine_requests / seconds),
            "seconds": round(seconds, 3),
            "step_times_s": round(timer.seconds, 3),
        }
    click.echo(json.dumps(result, indent=2))
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")


class Timed:
    """A timer, and how long it was asked."""

    def __init__(self, timer: Any) -> None:
        self._timer = timer
        self.time = timer.time
        self.seconds = 0.0

    def times(self, batches: Batches) -> StepTimes:
        began = time.perf_counter()
        times: StepTimes = self._timer.times(batches)
        self.seconds += time.perf_counter() - began
        return times


class timed_parts:
    """The seconds spent in the parts of a simulation while the block runs, by part."""

    _PARTS = (
        ("schedule", Scheduler, ("schedule", "update", "stride", "advance")),
        ("clock_and_timer", Log, ("settle", "take_stride")),
        ("records", fast._Simulation, ("_records",)),
    )

    def __enter__(self) -> dict[str, float]:
        seconds = {name: 0.0 for name, _, _ in self._PARTS}
        self._originals = []
        for name, owner, methods in self._PARTS:
            for method in methods:
                inner = getattr(owner, method)
                self._originals.append((owner, method, inner))
                setattr(owner, method, _timing(inner, name, seconds))
        return seconds

    def __exit__(self, *exc: object) -> None:
        for owner, method, inner in self._originals:
            setattr(owner, method, inner)


def _timing(inner: Any, name: str, seconds: dict[str, float]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - began

    return call


def one(
    workload: Any, limits: ServingLimits, timer: Timed, concurrency: int, parts: dict[str, float]
) -> dict[str, Any]:
    """One simulation: its speed, and the seconds of its parts."""
    timer.seconds = 0.0
    parts.update(dict.fromkeys(parts, 0.0))
    began, worked = time.perf_counter(), time.process_time()
    run = simulate(workload, limits, timer, concurrency=concurrency)
    seconds, processor = time.perf_counter() - began, time.process_time() - worked
    spent = {
        "schedule": parts["schedule"],
        "step_times": timer.seconds,
        "clock": parts["clock_and_timer"] - timer.seconds,
        "records": parts["records"],
    }
    spent["loop"] = seconds - sum(spent.values())
    return {
        "requests_per_s": round(len(workload) / seconds),
        "steps": len(run.steps),
        "simulated_s": round(run.steps[-1].end_s, 3),
        "seconds": round(seconds, 3),
        "processor_s": round(processor, 3),
        **{f"{name}_s": round(value, 3) for name, value in spent.items()},
    }


if __name__ == "__main__":
    main()
