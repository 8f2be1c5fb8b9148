"""Trace one case in this process and print what came out as one line of JSON.

Usage: python -m integration.coverage.one INDEX START PART...
START is when the parent started this process (time.time()); a PART is trace
(labels, collisions, cost) or runnable (entries, and what they cover).
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from dooly_backend.config import RunOptions
from dooly_backend.engines import Engine, boot
from dooly_backend.tracing.sizes import traced_batch
from dooly_backend.tracing.sources import collect
from dooly_backend.tracing.trace import STEP, Trace
from dooly_backend.tracing.tracer import labelled_pass, trace_model
from integration.coverage.corpus import CASES, Case
from integration.coverage.runnable import resolved

_REPEATS = 5


def measure(case: Case, start: float, parts: Collection[str]) -> dict[str, Any]:
    """The case's row of the table, those columns that `parts` fill."""
    with boot(options_of(case)) as engine:
        booted = time.time() - start
        trace = trace_model(engine)
        checked = time.time() - start
        row: dict[str, Any] = {
            "name": case.name,
            "shows": case.shows,
            "changes": case.changes,
            "layers": trace.layers,
        }
        if "trace" in parts:
            row |= {
                **figures(trace),
                "boot_seconds": round(booted, 1),
                "seconds": round(checked, 1),
                **colliding(engine, trace),
                "traced_to_plain": round(cost(engine, trace), 2),
                "peak_gib": peak_gib(),
            }
        if "runnable" in parts:
            before = time.time()
            row |= resolved(engine, trace)
            row["resolve_seconds"] = round(time.time() - before, 1)
            row["resolve_peak_gib"] = peak_gib()
    return row


def peak_gib() -> float:
    """Most memory that this process had so far."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1)


def options_of(case: Case) -> RunOptions:
    """RunOptions of a case: its model with the changes, in bfloat16, on two threads."""
    return RunOptions.checked(model=case.description, dtype="bfloat16", threads=2, **case.settings)


def figures(trace: Trace) -> dict[str, Any]:
    """Counts of one trace; labels before any repair are counted by the check."""
    inside = [op for op in trace.operations if op.path != STEP]
    labels = Counter(d.label.name for op in inside for d in op.dims() if d.size > 1)
    unlabelled = Counter(f"{op.name} in {op.path}" for op, _ in trace.unlabelled())
    check = trace.check
    return {
        "operations": len(inside),
        "operations_outside": len(trace.operations) - len(inside),
        "dimensions": check.dimensions,
        "labels": dict(labels),
        "unlabelled": dict(unlabelled),
        "accuracy": check.accuracy,
        "repaired": check.repaired,
        "following": check.following,
        "predicted": check.predicted,
        "planned": check.planned,
        "outside": check.outside,
        "outside_agreeing": check.outside_agreeing,
        "tokens": trace.num_tokens,
        "requests": trace.num_reqs,
    }


def colliding(engine: Engine, trace: Trace) -> dict[str, Any]:
    """Force a length equal to the hidden size, and a batch equal to the KV heads."""
    config = engine.configuration.hf_config
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    sizes = (int(config["hidden_size"]), heads)
    again = trace_model(engine, sizes=sizes)
    same = [
        [d.label.name for d in a.dims()] == [d.label.name for d in b.dims()]
        for a, b in zip(trace.operations, again.operations, strict=True)
    ]
    return {"collision": list(sizes), "retraced": again.attempts == 2, "same_labels": all(same)}


def cost(engine: Engine, trace: Trace) -> float:
    """A traced pass in plain ones: the fastest of five each, taking turns on a shared host."""
    tokens, requests = trace.num_tokens, trace.num_reqs
    batch = traced_batch(tokens, requests)
    sources = collect(engine)
    plain, traced = [], []
    for _ in range(_REPEATS):
        plain.append(_seconds(lambda: engine.step(batch)))
        traced.append(_seconds(lambda: labelled_pass(engine, tokens, requests, sources)))
    return min(traced) / min(plain)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    index, start, *parts = sys.argv[1:]
    print(json.dumps(measure(CASES[int(index)], float(start), parts)), flush=True)
