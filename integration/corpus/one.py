"""What one case would measure, as one line of JSON.

Usage: python -m integration.corpus.one NAME
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from dooly_backend.config import Grid, load_grid
from dooly_backend.database.records import Occurrence, Signature
from dooly_backend.engines import Engine, boot
from dooly_backend.operations.callgraph import occurrences, signatures
from dooly_backend.operations.runnable import resolve_from, tried
from dooly_backend.profiling.measure import Regime
from dooly_backend.profiling.plan import point_seconds
from dooly_backend.profiling.planners import group_of
from dooly_backend.profiling.sweep import sweep_points
from dooly_backend.tracing.tracer import trace_model
from integration.corpus.corpora import CASES, Case
from integration.coverage.runnable import covers

#: The sweep whose points are counted: the one for CPUs.
SWEEP = "quick"


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
        sweep = load_grid(SWEEP)
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
            **covers(engine, trace, runnable, finer),
            "seconds": round(time.perf_counter() - start, 1),
        }


def places(graph: list[Occurrence]) -> list[list[Any]]:
    """[path, hash, count] of every occurrence."""
    return [[o.path, o.signature.hash, o.count] for o in graph]


def described(
    graph: list[Occurrence], sweep: Grid, engine: Engine, canonical: bool = True
) -> dict[str, dict[str, Any]]:
    """Every signature by hash; of those that hold state, the canonical text too."""
    found = {o.signature.hash: o.signature for o in graph}
    each = point_seconds(None, Regime())
    return {
        digest: {
            "name": signature.name,
            "kind": signature.kind,
            "group": group_of(signature),
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


if __name__ == "__main__":
    wanted = next(case for case in CASES if case.name == sys.argv[1])
    sys.stdout.write(json.dumps(measure(wanted)) + "\n")
