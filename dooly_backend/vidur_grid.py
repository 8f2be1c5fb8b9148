"""The points that Vidur's own profiler measures, as far as limits allow.

Rules from microsoft/vidur, vidur/profiling/utils/__init__.py: tokens and KV
lengths in steps that grow with them, every batch size up to 128, every chunk
of a prompt that is cut into equal ones.
"""

from __future__ import annotations

from dooly_backend.workload import Batch

#: (first, last, step) of numbers of tokens, KV lengths, chunks, batch sizes.
_TOKENS = [
    (1, 2, 1),
    (4, 4, 1),
    (8, 1016, 8),
    *((1024 << power, 2048 << power, 16 << power) for power in range(7)),
]
_LENGTHS = [(32, 1024, 32), (1024, 4096, 64), (4096, 65536, 256)]
_CHUNKS = [
    (64, 128, 16),
    (128, 1024, 32),
    (1024, 4096, 64),
    (4096, 16384, 128),
    (16384, 65536, 256),
]
_BATCHES = [(1, 128, 1), (128, 1024, 8)]
#: Batches at which it times the sampler, with the host's work.
_SAMPLED = [(8, 64, 8), (64, 256, 16)]


def token_counts(most: int) -> list[int]:
    """New tokens of a step at which linear and other operations are measured."""
    return _numbers(_TOKENS, most)


def sampled_batches(most: int) -> list[int]:
    """Requests of a step at which sampling is measured."""
    return _numbers(_SAMPLED, most)


def prefills(longest: int) -> list[Batch]:
    """Every chunk of a prompt of `longest` tokens that is cut into equal ones, and whole prompts.

    Whole ones are shorter than `longest`.
    """
    chunks = [
        Batch.prefill(chunk, index * chunk)
        for chunk in _numbers(_CHUNKS, longest)
        for index in range(longest // chunk)
    ]
    whole = [Batch.prefill(length) for length in _numbers(_LENGTHS, longest - 1)]
    return list({batch.key: batch for batch in (*chunks, *whole)}.values())


def decodes(longest: int, most: int) -> list[Batch]:
    """Up to `most` requests of one KV length each, shorter than `longest`."""
    return [
        Batch.decode(count, length)
        for length in _numbers(_LENGTHS, longest - 1)
        for count in _numbers(_BATCHES, most)
    ]


def _numbers(ranges: list[tuple[int, int, int]], most: int) -> list[int]:
    found = {n for first, last, step in ranges for n in range(first, last + 1, step)}
    return sorted(n for n in found if n <= most)
