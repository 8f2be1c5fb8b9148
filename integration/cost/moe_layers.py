"""Timing a booted engine's mixture-of-experts layers and their gates."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from dooly_backend.engines import CapturedCall, Engine
from dooly_backend.errors import InputError
from dooly_backend.operations.callgraph import signatures
from dooly_backend.operations.runnable import resolve
from dooly_backend.profiling.measure import Regime, Subject, measure
from dooly_backend.profiling.profiler import measure_batch
from dooly_backend.profiling.sweep import batch_of
from dooly_backend.profiling.timer import quiet_process, timer_for
from dooly_backend.tracing.tracer import trace_model
from dooly_backend.workload import WorkloadPoint

IN_A_ROW = 20  # calls of a gate


def measure_experts(
    engine: Engine, regime: Regime, places: Iterable[tuple[int, int]]
) -> dict[str, Any]:
    """Samples of the engine's expert layer at every (tokens, experts that fire).

    Raises InputError for a model that has none, or several kinds.
    """
    trace = trace_model(engine)
    signed = signatures(trace, resolve(trace, engine), engine)
    routed = {each.hash: each.canonical for each in signed.values() if each.kind == "routing"}
    if len(routed) != 1:
        raise InputError(
            f"{engine.configuration.model} has {len(routed)} kinds of expert layers: give a model "
            "with one"
        )
    (hash_,) = routed
    timer = timer_for(engine)
    points: dict[str, Any] = {}
    with quiet_process():
        for tokens, experts in places:
            point = WorkloadPoint("routing", num_tokens=tokens, num_experts=experts)
            batch = batch_of(point, engine)
            found = measure_batch(engine, timer, batch, [(hash_, point)], signed, regime)
            if isinstance(found, str):
                points[point.key] = {"reason": f"{point.key}: {found}"}
                continue
            (measurement,) = found.values()
            points[point.key] = {
                "median_us": measurement.median_us,
                "unstable": measurement.unstable,
                "samples_us": [round(us, 3) for us in measurement.samples_us],
            }
    return {"signature": hash_, "canonical": json.loads(routed[hash_]), "points": points}


def gates(engine: Engine) -> dict[str, Any]:
    """The linear layers that score the experts, by path: they stand beside those that they route.

    Some models call them, in others the expert layer does: either way they are modules.
    """
    parents = {path.rpartition(".")[0] for path in engine.moe}
    beside = {f"{parent}.{name}" for parent in parents for name in ("gate", "router")}
    return {path: module for path, module in engine.modules.items() if path in beside}


def measure_gates(
    engine: Engine, regime: Regime, sizes: Sequence[int], inputs: int, same: int
) -> list[dict[str, Any]]:
    """Times of the last layer's gate over so many random inputs of each number of tokens.

    And over as many as `same` copies of one input, which tell how far apart equal calls are. All
    of a size take turns. A time is that of one of `IN_A_ROW` calls behind each other: the
    events of a GPU see one of two times some 0.8 us apart, and a gate takes 6 us. Raises
    InputError for a model without such a gate.
    """
    found = list(gates(engine).items())
    if not found:
        raise InputError(f"{engine.configuration.model} has no gate beside its experts")
    timer = timer_for(engine)
    rows = []
    with quiet_process():
        for tokens in sizes:
            point = WorkloadPoint("tokens", num_tokens=tokens)
            seeds = [*range(inputs), *[0] * same]
            subjects = {
                (f"input {i}", point): _subject(found[-2:], tokens, seed, engine)
                for i, seed in enumerate(seeds)
            }
            measured = measure(engine, timer, subjects, regime).values()
            times = [round(middle(m.samples_us) / IN_A_ROW, 3) for m in measured]
            rows.append({"tokens": tokens, "inputs_us": times[:inputs], "same_us": times[inputs:]})
    return rows


def middle(samples: Sequence[float]) -> float:
    """The mean of the middle half. Of few samples with one of two times a median is either."""
    quarter = len(samples) // 4
    return statistics.fmean(sorted(samples)[quarter : len(samples) - quarter])


def in_a_row(layer: Callable[..., Any], calls: int = IN_A_ROW) -> Callable[..., Any]:
    """What calls `layer` so often, and returns what the last call did."""

    def repeated(*args: Any, **kwargs: Any) -> Any:
        for _ in range(calls - 1):
            layer(*args, **kwargs)
        return layer(*args, **kwargs)

    return repeated


def _subject(layers: Sequence[tuple[str, Any]], tokens: int, seed: int, engine: Engine) -> Subject:
    """The last of `layers` with a random input, behind another one's with the same."""
    module = layers[-1][1]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn((tokens, int(module.input_size)), generator=generator)
    dtype = getattr(torch, engine.configuration.dtype)
    value = drawn.to(device=next(module.parameters()).device, dtype=dtype)
    calls = [CapturedCall(path, in_a_row(layer), (value,), {}, None, 0) for path, layer in layers]
    return Subject(calls[-1], None, calls[0] if len(calls) > 1 else None)
