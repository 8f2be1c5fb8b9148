"""The live truth beside a simulation: the same requests through a real engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dooly_backend.engines.serving import Server
from dooly_backend.simulation.arrivals import Feed
from dooly_backend.simulation.records import Run, ServingRequest

_WARM_UP_REQUESTS = 16
_WARM_UP_TOKENS = 24  # of output
_WARM_UP_IDS = 1_000_000_000  # of requests that are no part of a run


def serve(
    server: Server,
    requests: Sequence[ServingRequest],
    *,
    by_step: bool = False,
    concurrency: int | None = None,
) -> Run:
    """Serve `requests` on the wall clock, from an empty prefix cache.

    Arrivals are as in `arrivals.Feed`. Raises InputError for a request that the
    engine has no room for.
    """
    server.forget()
    return server.serve(Feed(requests, by_step=by_step, concurrency=concurrency))


def warm_up(server: Server, requests: Sequence[ServingRequest]) -> None:
    """Serve a few requests like these twice: engines compile kernels when they first need them."""
    few = [
        replace(
            request,
            id=request.id + _WARM_UP_IDS,
            arrival_s=0.0,
            prefix=None,
            output_tokens=min(request.output_tokens, _WARM_UP_TOKENS),
        )
        for request in requests[:_WARM_UP_REQUESTS]
    ]
    serve(server, few)
    serve(server, few, concurrency=max(1, len(few) // 4))
