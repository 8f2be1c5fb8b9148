"""What one case would measure, as one line of JSON.

Usage: python -m integration.corpus.one NAME
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from typing import Any

from dooly_backend.config import Sweep, load_sweep
from dooly_backend.database.records import Occurrence, Signature
from dooly_backend.engines import Engine, boot
from dooly_backend.operations.callgraph import occurrences, signatures
from dooly_backend.operations.cover import recorded, step_cover
from dooly_backend.operations.runnable import RunnableSet, resolve_from, tried
from dooly_backend.operations.tree import any_layer
from dooly_backend.profiling.measure import Regime
from dooly_backend.profiling.plan import point_seconds
from dooly_backend.profiling.planners import group_of
from dooly_backend.profiling.sweep import sweep_points
from dooly_backend.tracing.tracer import trace_model
from dooly_backend.workload import Batch
from integration.corpus.corpora import CASES, Case

#: The sweep whose points are counted: the one for CPUs.
SWEEP = "quick"

#: Steps of one phase alone, beside the mixed one that is traced.
PREFILLS = Batch.parse("2x40+0")
DECODES = Batch.parse("9x1+70")


def measure(case: Case) -> dict[str, Any]:
    """The case's part of the tables; nothing is timed."""
    start = time.perf_counter()
    with boot(case.options) as engine:
        trace = trace_model(engine)
        outcomes = tried(trace, engine)
        runnable = resolve_from(trace, engine, outcomes, prefer_operations=False)
        graph = occurrences(engine, signatures(trace, runnable, engine))
        finer = resolve_from(trace, engine, outcomes, prefer_operations=True)
        fine_graph = occurrences(engine, signatures(trace, finer, engine))
        sweep = load_sweep(SWEEP)
        return {
            "name": case.name,
            "backend": engine.configuration.backend,
            "hf_config": dict(engine.configuration.hf_config),
            "layers": [engine.num_layers, len(engine.stage)],
            "operations": len(trace.operations),
            "occurrences": places(graph),
            "signatures": described(graph, sweep, engine),
            "operation_signatures": described(fine_graph, sweep, engine, canonical=False),
            "operation_occurrences": sum(o.count for o in fine_graph),
            "entries": granularity(runnable),
            "operation_entries": granularity(finer),
            "steps": {
                name: phase(engine, runnable, finer, batch)
                for name, batch in (("prefill", PREFILLS), ("decode", DECODES))
            },
            "stateful": stateful(engine, runnable),
            "moe": {path: [m.experts, m.top_k] for path, m in engine.moe.items()},
            "seconds": round(time.perf_counter() - start, 1),
        }


def places(graph: list[Occurrence]) -> list[list[Any]]:
    """[path, hash, count] of every occurrence."""
    return [[o.path, o.signature.hash, o.count] for o in graph]


def described(
    graph: list[Occurrence], sweep: Sweep, engine: Engine, canonical: bool = True
) -> dict[str, dict[str, Any]]:
    """Every signature by hash; of those that hold state, the canonical text too."""
    found = {o.signature.hash: o.signature for o in graph}
    each = point_seconds(None, Regime())
    return {
        digest: {
            "name": signature.name,
            "kind": signature.kind,
            "group": group_of(signature.name, signature.kind),
            "granularity": signature.granularity,
            "points": (points := len(sweep_points(signature, sweep, engine))),
            "seconds": round(points * each, 2),
            **({"canonical": kept(signature)} if canonical and kept(signature) else {}),
        }
        for digest, signature in found.items()
    }


def kept(signature: Signature) -> str | None:
    """The canonical text where the corpus compares it."""
    return signature.canonical if signature.kind in ("batch", "routing") else None


def granularity(runnable: RunnableSet) -> dict[str, Any]:
    """How many entries of which granularity, and why those that are coarser are."""
    reasons: Counter[str] = Counter()
    for entry in runnable.entries:
        if entry.reason:
            reasons[f"{entry.name}: {generic(entry.reason)}"] += 1
    return {
        **Counter(entry.granularity for entry in runnable.entries),
        "stateful": sum(entry.stateful for entry in runnable.entries),
        "reasons": dict(reasons),
    }


def generic(reason: str) -> str:
    """A reason without the numbers of one layer or one machine."""
    return re.sub(r"0x[0-9a-f]+", "0x...", any_layer(reason))


def phase(
    engine: Engine, runnable: RunnableSet, finer: RunnableSet, batch: Batch
) -> dict[str, Any]:
    """How a step of one phase lies under the entries of the mixed step's trace."""
    step = recorded(engine, batch)
    found = {}
    for name, entries in (("modules", runnable.entries), ("operations", finer.entries)):
        cover = step_cover(step, entries)
        found[name] = {
            "kernels": cover.kernels,
            "gaps": sorted(set(cover.gaps)),
            "doubles": sorted(set(cover.doubles)),
            "idle": sorted(set(cover.idle)),
        }
    return found


def stateful(engine: Engine, runnable: RunnableSet) -> dict[str, Any]:
    """Paths that were found to need state by running them, and the engine's own registry."""
    return {
        "found": {e.path: e.name for e in runnable.entries if e.stateful},
        "registry": sorted(engine.stateful),
    }


if __name__ == "__main__":
    wanted = next(case for case in CASES if case.name == sys.argv[1])
    sys.stdout.write(json.dumps(measure(wanted)) + "\n")
