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
#: Prompts from a small one to the largest step, each so many times the one before, and with
#: numbers of tokens that 16 divides, that 8 does, and odd ones: kernels are compiled for each.
_SIZES_FROM, _SIZES_TIMES, _SIZES_BEYOND = 16, 1.2, (0, 8, 1)


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


def warm_up_sizes(server: Server) -> None:
    """Serve prompts of all sizes, one after the other, a token each.

    A mixture of experts has kernels that are compiled when a step of a size comes
    first, for a second and more. `warm_up` reaches the sizes of a few requests.
    """
    limits = server.limits
    most = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    serve(
        server,
        [
            ServingRequest(_WARM_UP_IDS + number, 0.0, tokens, 1)
            for number, tokens in enumerate(step_sizes(most))
        ],
        concurrency=1,
    )


def step_sizes(most: int) -> list[int]:
    """Numbers of tokens up to `most`, itself among them, ascending."""
    found = {most}
    size = float(_SIZES_FROM)
    while size <= most:
        multiple = round(size / 16) * 16
        found |= {multiple + more for more in _SIZES_BEYOND if multiple + more <= most}
        size *= _SIZES_TIMES
    return sorted(found)
