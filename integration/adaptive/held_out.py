"""Random places that no sweep knows: where predictions are judged."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from dooly_backend.workload import Batch, Request, WorkloadPoint


@dataclass(frozen=True)
class Caps:
    """What both sweeps may use: new tokens of a step, tokens of a request, requests."""

    tokens: int
    length: int
    batch: int


def token_places(caps: Caps, count: int, seed: int = 0) -> list[WorkloadPoint]:
    """Numbers of tokens, every second one spread by ratio, the others evenly."""
    source = random.Random(seed)
    return [WorkloadPoint("tokens", num_tokens=_drawn(source, i, 1, caps.tokens))
            for i in range(count)]  # fmt: skip


def attention_places(caps: Caps, count: int, seed: int = 0) -> list[WorkloadPoint]:
    """As many prefills as equal decodes, and a third as many of each other shape."""
    source = random.Random(seed)
    batches: list[Batch] = []
    for i in range(count):
        chunk = _drawn(source, i, 32, min(caps.tokens, caps.length) - 1)
        history = _drawn(source, i // 2, 0, caps.length - chunk - 1)
        batches.append(Batch.prefill(chunk, history if i % 4 else 0))
        size = _drawn(source, i, 1, caps.batch)
        batches.append(Batch.decode(size, _drawn(source, i // 2, 32, caps.length - 1)))
    for i in range(count // 3):
        size = _drawn(source, i, 2, caps.batch)
        lengths = [_drawn(source, i // 2, 32, caps.length - 1) for _ in range(size)]
        batches.append(Batch(tuple(Request(1, length) for length in lengths)))
        size = _drawn(source, i, 1, caps.batch - 1)
        chunk = _drawn(source, i, 32, min(caps.tokens - size, caps.length - 1))
        batches.append(
            Batch.prefill(chunk) + Batch.decode(size, _drawn(source, i, 32, caps.length - 1))
        )
    return [WorkloadPoint.of("batch", batch) for batch in dict.fromkeys(batches)]


def _drawn(source: random.Random, index: int, low: int, high: int) -> int:
    """A number from `low` to `high`, by ratio where `index` is even, else evenly."""
    high = max(low, high)
    if index % 2:
        return source.randint(low, high)
    first = max(low, 1)
    return round(math.exp(source.uniform(math.log(first), math.log(max(first, high)))))
