"""The `replay` predictor's table: seconds of a step by its sorted [extend, past] pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from dooly_backend.workload import Batch

from ..times import Axes, CallTimes

#: The simulator's nearest-neighbour search reads every entry at every miss.
MAX_ENTRIES = 3000
_PROMPTS = (2, 4, 8)


def replay_table(times: CallTimes, batches: Iterable[Batch]) -> dict[str, float]:
    table = {key_of(batch): times.step_us(batch) / 1e6 for batch in batches}
    return dict(sorted(table.items()))


def key_of(batch: Batch) -> str:
    """As the simulator writes it: ``[[1, 100], [8, 0]]``."""
    return json.dumps(sorted([request.query, request.context] for request in batch.requests))


def replay_batches(axes: Axes, max_tokens: int, max_seqs: int) -> list[Batch]:
    """Steps at measured places: decodes, prefills, several prompts, and both.

    The mixed ones come last and are thinned to `MAX_ENTRIES`.
    """
    chunks = [chunk for chunk in axes.chunks if chunk <= max_tokens]
    sizes = [size for size in axes.sizes if size <= max_seqs]
    batches = [Batch.decode(size, context) for size in sizes for context in axes.contexts]
    batches += [Batch.prefill(chunk, past) for chunk in chunks for past in axes.histories]
    batches += [
        Batch.prefill(chunk, 0, prompts)
        for chunk in chunks
        for prompts in _PROMPTS
        if chunk * prompts <= max_tokens and prompts <= max_seqs
    ]
    batches += axes.others
    mixed = [
        Batch.prefill(chunk) + Batch.decode(size, context)
        for chunk in chunks
        for size in sizes
        for context in axes.contexts
        if chunk + size <= max_tokens and size < max_seqs
    ]
    room = max(0, MAX_ENTRIES - len(batches))
    return (batches + _thinned(mixed, room))[:MAX_ENTRIES]


def _thinned(batches: Sequence[Batch], count: int) -> list[Batch]:
    """At most `count` of them, evenly spread."""
    if len(batches) <= count:
        return list(batches)
    return [batches[index * len(batches) // count] for index in range(count)]
