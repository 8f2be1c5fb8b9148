"""Tracing a model: labelled pass, differential passes, retrace on collisions."""

from __future__ import annotations

import logging
import time
from itertools import islice

from dooly_backend.engines import Engine
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.errors import TraceError
from dooly_backend.tracing import collectives  # noqa: F401 - registers its rules
from dooly_backend.tracing.differential import Pass, check
from dooly_backend.tracing.labels import Source, conflicts, labels_by_value
from dooly_backend.tracing.modes import DispatchTracer, FunctionTracer, Labeller
from dooly_backend.tracing.sizes import collision_free_sizes, traced_batch
from dooly_backend.tracing.sources import engine_sources, model_sources, request_sources
from dooly_backend.tracing.trace import ModuleRecord, Trace

log = logging.getLogger(__name__)

_PASSES = 4  # the labelled one, two that solve, one held out


def trace_model(engine: Engine, sizes: tuple[int, int] | None = None) -> Trace:
    """Trace one mixed step of `engine`'s model and check every label.

    `sizes` forces the (tokens, requests) of the first attempt; when they
    collide with sizes of the model, the pass is traced again with others.
    Raises TraceError when the passes diverge or the sizes cannot be avoided.
    """
    start = time.perf_counter()
    constants = model_sources(engine) | engine_sources(engine)
    free = collision_free_sizes(
        {s.value for s in constants}, engine.max_num_tokens, engine.max_num_reqs
    )
    attempts = 1
    if sizes is not None:
        collisions = conflicts(constants | request_sources(*sizes))
        if collisions:
            log.warning("traced sizes %s collide with %s: tracing again", sizes, collisions)
            attempts, sizes = 2, None
    points = list(islice(free, _PASSES - (sizes is not None)))
    if sizes is not None:
        points.insert(0, sizes)
    if len(points) < _PASSES:
        raise TraceError("too few sizes differ from the model's: raise max_num_seqs")
    # The first pass in a process does one-time work that later ones skip.
    engine.step(traced_batch(*points[0]))
    labelled, modules = _pass(engine, *points[0], constants)
    others = [_pass(engine, *point, None)[0] for point in points[1:]]
    result, formulas, operations = check(labelled, others[:2], others[2])
    return Trace(
        model=engine.configuration.model,
        num_tokens=labelled.num_tokens,
        num_reqs=labelled.num_reqs,
        layers=engine.num_layers,
        modules=modules,
        operations=operations,
        check=result,
        formulas=formulas,
        seconds=time.perf_counter() - start,
        attempts=attempts,
    )


def _pass(
    engine: Engine, num_tokens: int, num_reqs: int, constants: set[Source] | None
) -> tuple[Pass, tuple[ModuleRecord, ...]]:
    """One pass with the modes on; without `constants` only sizes are recorded."""
    registry = (
        labels_by_value(constants | request_sources(num_tokens, num_reqs)) if constants else {}
    )
    labeller = Labeller(registry)
    functions = FunctionTracer(labeller) if constants else None
    stack = ModuleStack(engine.modules)
    tracer = DispatchTracer(
        stack, labeller, engine.operation_bodies, functions, label=constants is not None
    )
    with stack.tracking(), tracer.active():
        engine.step(traced_batch(num_tokens, num_reqs))
    modules = tuple(ModuleRecord(*entry) for entry in stack.entered)
    return Pass(num_tokens, num_reqs, tuple(tracer.operations)), modules
