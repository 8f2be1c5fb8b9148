"""The tokens of a request: the same on every host, shared where requests share a prefix."""

from __future__ import annotations

import numpy as np

from dooly_backend.simulation.records import ServingRequest


def prompt(request: ServingRequest, vocab_size: int) -> list[int]:
    """The prompt of `request`: drawn from a generator seeded with its prefix or its id.

    Blocks of two requests are equal only inside a prefix that they share: by
    chance a block of 16 tokens of a vocabulary of 1000 repeats once in 10**48.
    """
    shared = 0 if request.prefix is None else min(request.prefix_tokens, request.prompt_tokens)
    own = _tokens((0, request.id), request.prompt_tokens - shared, vocab_size)
    if not shared or request.prefix is None:
        return own
    return _tokens((1, request.prefix), shared, vocab_size) + own


def _tokens(seed: tuple[int, int], count: int, vocab_size: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, vocab_size, count).tolist()
    return tokens
