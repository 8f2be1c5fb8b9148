"""The 18 features of SGLang Simulator's `ml` predictor, restated: names and order are fixed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dooly_backend.workload import Batch

FEATURES = (
    "batch_size",
    "sum_extend",
    "max_extend",
    "min_extend",
    "sum_past",
    "max_past",
    "min_past",
    "sum_extend_x_past",
    "sum_extend_squared",
    "sum_past_squared",
    "sum_attn_flops",
    "sum_extend_x_max_past",
    "log1p_sum_past",
    "log1p_sum_attn_flops",
    "batch_size_x_sum_extend",
    "max_past_minus_min_past",
    "is_decode",
    "is_prefill",
)


def features_of(batch: Batch) -> list[float]:
    """`extend` are a request's new tokens, `past` those in the KV cache before the step."""
    extends = [request.query for request in batch.requests]
    pasts = [request.context for request in batch.requests]
    pairs = list(zip(extends, pasts, strict=True))
    size, extend, past = len(pairs), sum(extends), sum(pasts)
    work = _sum([e * (p + e / 2) for e, p in pairs])
    return [
        size,
        extend,
        max(extends),
        min(extends),
        past,
        max(pasts),
        min(pasts),
        _sum([e * p for e, p in pairs]),
        _sum([e * e for e in extends]),
        _sum([p * p for p in pasts]),
        work,
        extend * max(pasts),
        math.log1p(past),
        math.log1p(work),
        size * extend,
        max(pasts) - min(pasts),
        int(all(e == 1 for e in extends)),
        int(any(e > 1 for e in extends)),
    ]


def _sum(values: Sequence[float]) -> float:
    return float(sum(values))
