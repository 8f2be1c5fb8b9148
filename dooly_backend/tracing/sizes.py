"""Sizes of traced steps that cannot be mistaken for the model's."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dooly_backend.errors import TraceError
from dooly_backend.workload import Batch

#: Context of the decodes in a traced step; the same in every pass, so that
#: only tokens and requests change.
CONTEXT = 53


def traced_batch(num_tokens: int, num_reqs: int) -> Batch:
    """A mixed step: one prefill beside ``num_reqs - 1`` decodes, `num_tokens` tokens in all."""
    prefill = Batch.prefill(num_tokens - num_reqs + 1)
    return prefill + Batch.decode(num_reqs - 1, CONTEXT) if num_reqs > 1 else prefill


def collision_free_sizes(
    values: Collection[int], max_tokens: int, max_reqs: int
) -> Iterator[tuple[int, int]]:
    """(T, R) whose sizes cannot be confused with `values`, smallest first, never collinear thrice.

    T, T+1, R and R+1 occur nowhere in `values`, and T and R neither divide nor
    are multiples of a value. Raises TraceError when a value cannot be avoided.
    """
    free_tokens = [t for t in range(2 * CONTEXT + 1, max_tokens) if _is_free(t, values)]
    free_reqs = [r for r in range(5, min(max_reqs, CONTEXT)) if _is_free(r, values)]
    if len(free_tokens) < 8 or len(free_reqs) < 4:
        raise TraceError(
            f"no traced sizes up to {max_tokens} tokens and {max_reqs} requests differ from all "
            "sizes of the model: raise max_num_batched_tokens or max_num_seqs"
        )
    # Steps of 1, 3, 2, ... in T against 1 in R keep any three points off a line.
    for attempt in range(min(len(free_tokens) // 2, len(free_reqs))):
        yield free_tokens[(attempt * attempt + attempt) % len(free_tokens)], free_reqs[attempt]


def _is_free(size: int, values: Collection[int]) -> bool:
    return all(
        size != v
        and size + 1 != v
        and (v < 2 or v % size != 0)
        and (v < 8 or size % v != 0)
        for v in values
    )
