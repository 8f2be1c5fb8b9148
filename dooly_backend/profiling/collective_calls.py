"""The collectives of a trace as occurrences of the call graph, and their points in a sweep."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dooly_backend.config import AdaptiveSweep, Grid
from dooly_backend.database import Database
from dooly_backend.database.records import Occurrence
from dooly_backend.engines import Engine
from dooly_backend.engines.layers import layers_represented
from dooly_backend.operations.tree import any_layer, is_collective, layer_of
from dooly_backend.profiling.collectives import (
    Collective,
    available_degree,
    measure_collectives,
)
from dooly_backend.profiling.measure import Regime
from dooly_backend.tracing.trace import STEP, Affine, Operation, Trace
from dooly_backend.workload import PointKind, WorkloadPoint

log = logging.getLogger(__name__)

#: Sent by one stage and received by the next: counted where it is received.
_RECEIVED = "recv"
_SENT = "send"


@dataclass(frozen=True)
class CollectiveCall:
    """A collective at one place of the full model's step."""

    collective: Collective
    path: str
    layers: tuple[int, ...]
    count: int


def collective_calls(trace: Trace, engine: Engine) -> list[CollectiveCall]:
    """Those of the trace that can be measured on this host, counted for the full model."""
    stands_for = layers_represented(engine.layer_kinds, engine.num_layers, engine.stage)
    backend = "nccl" if engine.environment.device_kind == "cuda" else "gloo"
    found: list[CollectiveCall] = []
    for op in trace.operations:
        base = op.name.split(".")[0].removeprefix("dooly::")
        if not is_collective(op) or not op.name.startswith("dooly::") or base == _SENT:
            continue
        collective = _collective(op, base, trace, backend)
        layer = layer_of(op.path)
        layers = stands_for[layer] if layer is not None else ()
        if collective is None or (layer is not None and not layers):
            continue
        path = "" if op.path == STEP else any_layer(op.path)
        found.append(CollectiveCall(collective, path, layers, len(layers) or 1))
    degrees = {call.collective.degree for call in found}
    most = available_degree(backend)
    if any(degree > most for degree in degrees):
        log.warning(
            "collectives of degree %s are not measured: this host has %d devices",
            ", ".join(str(degree) for degree in sorted(degrees) if degree > most),
            most,
        )
    return [call for call in found if call.collective.degree <= most]


def _collective(op: Operation, base: str, trace: Trace, backend: str) -> Collective | None:
    (tensor, *_) = op.inputs
    dims = [
        _affine(trace, op, index, dim.size, dim.label.name) for index, dim in enumerate(tensor.dims)
    ]
    sizes = [dim for dim in dims if dim.from_request]
    constant = 1
    for dim in dims:
        constant *= 1 if dim.from_request else dim.constant
    kind: PointKind = "constant"
    if sizes:
        (size, *more) = sizes
        kind = "tokens" if size.tokens else "requests"
        if more or (size.tokens and size.requests):
            log.warning("%s in %s has a size that is not measured", op.name, op.path)
            return None
        constant *= size.tokens or size.requests
    operation = "send_recv" if base == _RECEIVED else base
    degree = 2 if operation == "send_recv" else op.scalars[-1].size
    return Collective(operation, degree, tensor.dtype, constant, kind, backend)


def _affine(trace: Trace, op: Operation, index: int, size: int, label: str) -> Affine:
    """How a dimension of the first input grows; outside of modules its label tells."""
    formulas = trace.formulas.get(op.index)
    if formulas is not None and formulas[index] is not None:
        found = formulas[index]
        assert found is not None
        return found
    if label == "num_toks" or size == trace.num_tokens:
        return Affine(0, 1, 0)
    if label == "num_reqs" or size == trace.num_reqs:
        return Affine(0, 0, 1)
    return Affine(size, 0, 0)


def occurrences_of(calls: Sequence[CollectiveCall], first: int) -> list[Occurrence]:
    """The calls behind the rest of the call graph, at positions from `first` on."""
    return [
        Occurrence(
            first + index,
            call.path,
            "collective",
            call.collective.signature,
            call.count,
            call.layers,
        )
        for index, call in enumerate(calls)
    ]


def points_of(
    collective: Collective, sweep: Grid | AdaptiveSweep, engine: Engine
) -> list[WorkloadPoint]:
    """A grid's own points; else powers of two. Times of collectives are smooth in their size."""
    if collective.kind == "constant":
        return [WorkloadPoint("constant")]
    of_tokens = collective.kind == "tokens"
    most = engine.max_num_tokens if of_tokens else engine.max_num_reqs
    if isinstance(sweep, AdaptiveSweep):
        sizes = [1 << n for n in range(most.bit_length()) if 1 << n <= most]
    else:
        points = sweep.token_points() if of_tokens else sweep.request_points()
        sizes = [size for p in points if (size := (p.num_tokens or p.num_reqs or 1)) <= most]
    if of_tokens:
        return [WorkloadPoint("tokens", num_tokens=size) for size in sizes]
    return [WorkloadPoint("requests", num_reqs=size) for size in sizes]


def missing_points(
    calls: Sequence[CollectiveCall],
    database: Database,
    environment_id: int,
    sweep: Grid | AdaptiveSweep,
    engine: Engine,
) -> dict[Collective, list[WorkloadPoint]]:
    """Points of each collective that this environment lacks."""
    missing = {}
    for collective in dict.fromkeys(call.collective for call in calls):
        settled = database.settled_points(collective.signature.hash, environment_id)
        points = points_of(collective, sweep, engine)
        missing[collective] = [point for point in points if point.key not in settled]
    return {collective: points for collective, points in missing.items() if points}


def record_collectives(
    missing: Mapping[Collective, Sequence[WorkloadPoint]],
    database: Database,
    ids: tuple[int, int],
    regime: Regime,
    advance: Callable[[int], None],
) -> int:
    """Measure and store them; how many points are new. `ids`: configuration, environment."""
    configuration_id, environment_id = ids
    new = 0
    for collective, measurements in measure_collectives(missing, regime).items():
        for measurement in measurements:
            new += database.record(
                collective.signature, environment_id, measurement, configuration_id
            )
            advance(1)
    return new
