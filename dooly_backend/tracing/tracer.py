"""Tracing a model: labelled pass, differential passes, retrace on collisions."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

from dooly_backend.engines import Engine
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.errors import DoolyError, TraceError
from dooly_backend.tracing.differential import Pass, check
from dooly_backend.tracing.labels import ENGINE, MODEL_CONFIG, conflicts
from dooly_backend.tracing.modes import (
    ALL_RULES,
    DispatchTracer,
    FunctionTracer,
    Labeller,
    RuleSet,
)
from dooly_backend.tracing.sizes import collision_free_sizes, is_free, traced_batch
from dooly_backend.tracing.sources import Sources, collect, request_labels, request_sources
from dooly_backend.tracing.trace import ModuleRecord, Operation, Trace

log = logging.getLogger(__name__)

#: Tokens of the pass that comes first, beside its requests: it only warms up.
_WARM_UP = 2


@dataclass(frozen=True)
class Plan:
    """(tokens, requests) of the passes of a trace.

    Against `labelled`, only the requests change in `requests` and only the
    tokens in `tokens`; in `held_out` both do.
    """

    labelled: tuple[int, int]
    requests: tuple[int, int]
    tokens: tuple[int, int]
    held_out: tuple[int, int]
    attempts: int = 1


def trace_model(
    engine: Engine, sizes: tuple[int, int] | None = None, rules: RuleSet = ALL_RULES
) -> Trace:
    """Trace one mixed step of `engine`'s model and check every label.

    `sizes` forces the (tokens, requests) of the first attempt; when they
    collide with sizes of the model, the pass is traced again with others.
    `rules` switches off kinds of rules, for the ablation only. Raises
    TraceError when the passes diverge or the sizes cannot be avoided.
    """
    start = time.perf_counter()
    sources = collect(engine)
    plan = plan_passes(sources, engine.max_num_tokens, engine.max_num_reqs, sizes)
    # The first pass in a process does one-time work that later ones skip.
    requests = plan.labelled[1]
    plain_pass(engine, requests + _WARM_UP, requests)
    labelled, modules = labelled_pass(engine, *plan.labelled, sources, rules)
    others = [plain_pass(engine, *plan.requests), plain_pass(engine, *plan.tokens)]
    held_out = plain_pass(engine, *plan.held_out)
    result, formulas, operations = check(labelled, others, held_out, planning=frozenset(engine.moe))
    return Trace(
        model=engine.configuration.model,
        num_tokens=labelled.num_tokens,
        num_reqs=labelled.num_reqs,
        layers=engine.num_layers,
        modules=modules,
        operations=operations,
        check=result,
        formulas=formulas,
        origins=_origins(sources, operations),
        seconds=time.perf_counter() - start,
        attempts=plan.attempts,
    )


def plan_passes(
    sources: Sources, max_tokens: int, max_reqs: int, sizes: tuple[int, int] | None = None
) -> Plan:
    """Sizes of the four passes; `sizes` for the labelled one where they collide with nothing.

    Raises TraceError when the engine's limits leave no free sizes.
    """
    constants = {source.value for source in sources.sizes}
    attempts = 1
    if sizes is not None:
        collisions = conflicts(sources.sizes | request_sources(*sizes))
        if collisions:
            log.warning(
                "traced sizes %s collide: %s; tracing again with others",
                sizes,
                "; ".join(
                    f"{value} is {' and '.join(sorted(bases))}"
                    for value, bases in sorted(collisions.items())
                ),
            )
            attempts, sizes = 2, None
    free = collision_free_sizes(constants, max_tokens, max_reqs)
    if sizes is None:
        sizes = next(free)
    tokens, requests = sizes
    others = [point for point in islice(free, 24) if point[0] != tokens and point[1] != requests]
    for other_tokens, other_reqs in others:
        later = [p for p in others if p[0] != other_tokens and p[1] != other_reqs]
        if later and is_free(tokens - other_reqs + 1, constants):
            return Plan(sizes, (tokens, other_reqs), (other_tokens, requests), later[0], attempts)
    raise TraceError(
        "too few numbers of tokens and requests differ from all sizes of the model: "
        "raise max_num_batched_tokens or max_num_seqs"
    )


def labelled_pass(
    engine: Engine, num_tokens: int, num_reqs: int, sources: Sources, rules: RuleSet = ALL_RULES
) -> tuple[Pass, tuple[ModuleRecord, ...]]:
    """The pass that labels: both modes on, and every integer of the model tainted."""
    labeller = Labeller(
        sources.registry, request_labels(num_tokens, num_reqs), sources.tensors, rules
    )
    return _pass(engine, num_tokens, num_reqs, labeller, sources)


def plain_pass(engine: Engine, num_tokens: int, num_reqs: int) -> Pass:
    """A pass that records sizes only, to compare with."""
    return _pass(engine, num_tokens, num_reqs, Labeller({}), None)[0]


def _pass(
    engine: Engine, num_tokens: int, num_reqs: int, labeller: Labeller, sources: Sources | None
) -> tuple[Pass, tuple[ModuleRecord, ...]]:
    functions = FunctionTracer(labeller) if sources else None
    stack = ModuleStack(engine.modules)
    tracer = DispatchTracer(
        stack, labeller, engine.operation_bodies, functions, label=sources is not None
    )
    tainted = sources.tainted() if sources else nullcontext()
    try:
        with tainted, stack.tracking(), tracer.recording():
            engine.step(traced_batch(num_tokens, num_reqs))
    except DoolyError:
        raise
    except Exception as error:
        # Whatever a model's forward raises; the whole chain stays in __cause__.
        raise TraceError(_failure(engine, tracer, error)) from error
    modules = tuple(ModuleRecord(*entry) for entry in stack.entered)
    return Pass(num_tokens, num_reqs, tuple(tracer.operations)), modules


def _failure(engine: Engine, tracer: DispatchTracer, error: Exception) -> str:
    """One line that says where a step failed, and how."""
    last = tracer.operations[-1] if tracer.operations else None
    where = f" in {last.path} at {last.name}" if last else ""
    reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
    return f"a step of {engine.configuration.model} fails{where}: {type(error).__name__}: {reason}"


def _origins(
    sources: Sources, operations: tuple[Operation, ...]
) -> dict[str, dict[int, tuple[str, ...]]]:
    """Paths of the constants that the labels speak of, by base and value.

    A value that stands nowhere (half of a projection) is traced back to the
    ones that its label had when it first appeared.
    """
    dims = [dim for op in operations for dim in op.dims()]
    found: dict[str, dict[int, tuple[str, ...]]] = {}
    for source in sorted({s for dim in dims for s in dim.label.sources}):
        paths = tuple(sources.origins.get(source, ()))
        if not paths and source.base in (MODEL_CONFIG, ENGINE):
            earlier = sorted(
                {
                    s.value
                    for dim in dims
                    if dim.size == source.value and dim.label.bases == {source.base}
                    for s in dim.label.sources
                    if s in sources.origins
                }
            )
            paths = (f"from {', '.join(map(str, earlier))}",) if earlier else ()
        if paths:
            found.setdefault(source.base, {})[source.value] = paths
    return found
