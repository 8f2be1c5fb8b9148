"""How the runnable set of one trace covers its pass and steps of one phase alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dooly_backend.engines import Engine
from dooly_backend.operations.cover import recorded, step_cover
from dooly_backend.operations.runnable import Entry, RunnableSet, resolve_from, tried
from dooly_backend.operations.tree import any_layer
from dooly_backend.tracing.trace import Trace
from dooly_backend.workload import Batch

#: Steps of one phase alone, beside the mixed one that is traced.
PHASES = {"prefill": Batch.parse("2x40+0"), "decode": Batch.parse("9x1+70")}


def resolved(engine: Engine, trace: Trace) -> dict[str, Any]:
    """`covers` of the runnable sets of `trace`: whole modules, and operations where they run.

    Raises TraceError where a call can be run neither alone nor within a caller.
    """
    outcomes = tried(trace, engine)
    runnable, finer = (
        resolve_from(trace, engine, outcomes, prefer_operations=prefer) for prefer in (False, True)
    )
    return covers(engine, trace, runnable, finer)


def covers(
    engine: Engine, trace: Trace, runnable: RunnableSet, finer: RunnableSet
) -> dict[str, Any]:
    """The entries of both runnable sets, and how the traced step and others lie under them."""
    steps = {"traced": trace} | {name: recorded(engine, batch) for name, batch in PHASES.items()}
    return {
        "entries": granularity(runnable),
        "operation_entries": granularity(finer),
        "steps": {
            name: {
                "modules": _cover(step, runnable.entries),
                "operations": _cover(step, finer.entries),
            }
            for name, step in steps.items()
        },
        "stateful": stateful(engine, runnable),
        "moe": {path: [layer.experts, layer.top_k] for path, layer in engine.moe.items()},
    }


def granularity(runnable: RunnableSet) -> dict[str, Any]:
    """How many entries of which granularity, and why those that are coarser are."""
    reasons: Counter[str] = Counter()
    for entry in runnable.entries:
        if entry.reason:
            reasons[f"{entry.name}: {generic(entry.reason)}"] += 1
    return {
        **Counter(entry.granularity for entry in runnable.entries),
        "stateful": sum(entry.stateful for entry in runnable.entries),
        "captured": sum(bool(entry.captured) for entry in runnable.entries),
        "reasons": dict(reasons),
    }


def generic(reason: str) -> str:
    """A reason without the numbers of one layer or one machine."""
    return re.sub(r"0x[0-9a-f]+", "0x...", any_layer(reason))


def _cover(step: Trace, entries: Sequence[Entry]) -> dict[str, Any]:
    cover = step_cover(step, entries)
    return {
        "kernels": cover.kernels,
        "once": cover.kernels - len(cover.gaps) - len(cover.doubles),
        "gaps": sorted(set(cover.gaps)),
        "doubles": sorted(set(cover.doubles)),
        "idle": sorted(set(cover.idle)),
    }


def stateful(engine: Engine, runnable: RunnableSet) -> dict[str, Any]:
    """Paths that were found to need state by running them, and the engine's own registry."""
    return {
        "found": {e.path: e.name for e in runnable.entries if e.stateful},
        "registry": sorted(engine.stateful),
    }


def registry_agrees(result: dict[str, Any]) -> bool:
    """Whether what needed state when run is what the engine's registry binds to state.

    Mixture-of-experts layers apart: they need the context to look themselves up.
    """
    found = set(result["stateful"]["found"]) - set(result["moe"])
    return found == set(result["stateful"]["registry"])
