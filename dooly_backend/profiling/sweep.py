"""The points at which a signature is timed, and batches that show them."""

from __future__ import annotations

import json

from dooly_backend.config import Grid
from dooly_backend.database.records import Signature
from dooly_backend.engines import Engine
from dooly_backend.workload import Batch, Request, WorkloadPoint

#: Context of the decodes that show a number of requests; it does not matter to their time.
_CONTEXT = 64


def sweep_points(
    signature: Signature, sweep: Grid, engine: Engine
) -> list[tuple[WorkloadPoint, Batch]]:
    """The points of a signature, each with a batch that shows it, within the engine's limits."""
    pairs = [(point, batch_of(point, engine)) for point in _points(signature, sweep, engine)]
    return [(point, batch) for point, batch in pairs if fits(batch, engine)]


def _points(signature: Signature, sweep: Grid, engine: Engine) -> list[WorkloadPoint]:
    if signature.kind == "tokens":
        return sweep.token_points()
    if signature.kind == "requests":
        return sweep.request_points()
    if signature.kind == "batch":
        return sweep.batch_points(engine.max_request_len)
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
    return (
        batch.num_tokens <= engine.max_num_tokens
        and batch.num_reqs <= engine.max_num_reqs
        and batch.longest <= engine.max_request_len
    )
