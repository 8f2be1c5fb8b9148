"""Sizes of traced steps that cannot be mistaken for the model's."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import combinations

from dooly_backend.errors import TraceError
from dooly_backend.workload import Batch

#: Context of the decodes in a traced step; the same in every pass, so that
#: only tokens and requests change.
CONTEXT = 41

#: How far above the fewest tokens to look for free numbers.
_RANGE = 2000


def traced_batch(num_tokens: int, num_reqs: int) -> Batch:
    """A mixed step: one prefill beside ``num_reqs - 1`` decodes, `num_tokens` tokens in all."""
    prefill = Batch.prefill(num_tokens - num_reqs + 1)
    return prefill + Batch.decode(num_reqs - 1, CONTEXT) if num_reqs > 1 else prefill


def collision_free_sizes(
    values: Collection[int], max_tokens: int, max_reqs: int
) -> Iterator[tuple[int, int]]:
    """(T, R) whose sizes cannot be confused with `values`, smallest first, no three on a line.

    T, T+1, R-1 (the decodes), R, R+1 and the prefill's length T-R+1 are none of
    `values`, and T, R and T-R+1 neither divide nor are multiples of one; where
    too few R are left, some that divide a value come last. Raises TraceError
    when a value cannot be avoided.
    """
    longest = min(max_tokens, 2 * CONTEXT + _RANGE)
    free_tokens = [t for t in range(2 * CONTEXT + 1, longest) if is_free(t, values)]
    distinct = [r for r in range(5, min(max_reqs, CONTEXT)) if not {r - 1, r, r + 1} & set(values)]
    free_reqs = sorted(distinct, key=lambda r: (not is_free(r, values), r))
    if len(free_tokens) < 8 or len(free_reqs) < 4:
        raise TraceError(
            f"no traced sizes up to {max_tokens} tokens and {max_reqs} requests differ from all "
            "sizes of the model: raise max_num_batched_tokens or max_num_seqs"
        )
    used: list[tuple[int, int]] = []
    for requests in free_reqs:
        on_lines = {
            t1 + (t2 - t1) * (requests - r1) / (r2 - r1)
            for (t1, r1), (t2, r2) in combinations(used, 2)
        } | {t for t, _ in used}
        tokens = next(
            (t for t in free_tokens if t not in on_lines and is_free(t - requests + 1, values)),
            None,
        )
        if tokens is not None:
            used.append((tokens, requests))
            yield tokens, requests


def is_free(size: int, values: Collection[int]) -> bool:
    """Whether a step may have this size: no value, no divisor, and no multiple of one."""
    return all(
        size != v and size + 1 != v and (v < 2 or v % size != 0) and (v < 8 or size % v != 0)
        for v in values
    )
