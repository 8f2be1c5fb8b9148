"""The points at which a signature is timed, and batches that show them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from dooly_backend.config import AdaptiveSweep, Grid
from dooly_backend.database import Database
from dooly_backend.database.records import BEYOND_LIMITS, Signature
from dooly_backend.engines import Engine
from dooly_backend.workload import Batch, Request, WorkloadPoint

#: What bounds the points of a sweep, by its name in an Engine.
LIMITS = ("max_num_tokens", "max_num_reqs", "max_request_len")
#: Context of the decodes that show a number of requests; it does not matter to their time.
_CONTEXT = 64


def sweep_points(
    signature: Signature, sweep: Grid, engine: Engine
) -> list[tuple[WorkloadPoint, Batch]]:
    """The points of a signature, each with a batch that shows it, within the engine's limits."""
    points = _points(signature, sweep, engine.max_request_len)
    pairs = [(point, batch_of(point, engine)) for point in points]
    return [(point, batch) for point, batch in pairs if fits(batch, engine)]


def beyond_limits(
    signature: Signature, sweep: Grid, engine: Engine
) -> list[tuple[WorkloadPoint, str]]:
    """The points of a signature that this engine's limits keep out, each with the reason."""
    found = []
    for point in _points(signature, sweep, sys.maxsize):
        excess = _excess(batch_of(point, engine), engine)
        if excess is not None:
            found.append((point, f"{BEYOND_LIMITS}: {excess}"))
    return found


def record_limits(
    engine: Engine,
    database: Database,
    environment_id: int,
    signatures: Iterable[Signature],
    sweep: Grid | AdaptiveSweep,
) -> dict[str, tuple[str, ...]]:
    """Record the points of `sweep` that the engine's limits keep out; new ones by reason.

    An adaptive sweep asks for no point beyond them.
    """
    new: dict[str, tuple[str, ...]] = {}
    if isinstance(sweep, AdaptiveSweep):
        return new
    for signature in signatures:
        known = {s.point for s in database.skipped(signature.hash, environment_id)}
        known |= {m.point for m in database.measurements(signature.hash, environment_id)}
        for point, reason in beyond_limits(signature, sweep, engine):
            if point not in known and database.skip(signature, environment_id, point, reason):
                new[reason] = (*new.get(reason, ()), point.key)
    return new


def _points(signature: Signature, sweep: Grid, longest: int) -> list[WorkloadPoint]:
    if signature.kind == "tokens":
        return sweep.token_points()
    if signature.kind == "requests":
        return sweep.request_points()
    if signature.kind == "batch":
        return sweep.batch_points(longest)
    if signature.kind == "routing":
        routing = json.loads(signature.canonical)["routing"]
        return sweep.routing_points(routing["experts"], routing["top_k"])
    return [WorkloadPoint("constant")]


def batch_of(point: WorkloadPoint, engine: Engine) -> Batch:
    if point.batch is not None:
        return point.batch
    if point.num_reqs is not None:
        return Batch.decode(point.num_reqs, min(_CONTEXT, engine.max_request_len - 1))
    return prefills(point.num_tokens or 1, engine.max_request_len)


def prefills(tokens: int, longest: int) -> Batch:
    """`tokens` new tokens in as few prefills as the engine's longest request allows."""
    whole, rest = divmod(tokens, longest)
    lengths = [longest] * whole + [rest] * bool(rest)
    return Batch(tuple(Request(length, 0) for length in lengths))


def fits(batch: Batch, engine: Engine) -> bool:
    return _excess(batch, engine) is None


def _excess(batch: Batch, engine: Engine) -> str | None:
    """What of a batch is more than the engine takes; None when it fits."""
    limits = (
        (batch.num_tokens, engine.max_num_tokens, "tokens a step"),
        (batch.num_reqs, engine.max_num_reqs, "requests a step"),
        (batch.longest, engine.max_request_len, "tokens a request"),
    )
    over = (f"{value} {what}, it takes {limit}" for value, limit, what in limits if value > limit)
    return next(over, None)
