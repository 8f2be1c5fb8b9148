"""Attention with a sliding window: what kernels take that see more than the window holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from sample_records import at

from dooly_backend.database.records import Signature
from dooly_backend.regression.fitting import fit_signature
from dooly_backend.workload import Batch, Request

WINDOW = 1000
WINDOWED = Signature(
    "Attention", "module", "batch", f'{{"attributes": {{"sliding_window": {WINDOW}}}}}'
)
SIZES, CONTEXTS = (1, 2, 3, 4, 6, 8, 12, 16), (64, 512, 1024, 2048, 4096, 16384)


def two_lengths(count: int, short: int, long: int) -> Batch:
    return Batch((Request(1, long),) * (count // 2) + (Request(1, short),) * (count - count // 2))


EVEN = [Batch.decode(n, c) for n in SIZES for c in CONTEXTS]
UNEVEN = [two_lengths(n, c, 3 * c) for n in SIZES[1:] for c in (512, 2048, 4096)]


def read_us(batch: Batch) -> float:
    return 10 + sum(min(r.context + 1, WINDOW) for r in batch.decodes) / 300


def pieces_us(batch: Batch) -> float:
    """Up to 16 requests vLLM's Triton attention divides all keys: one piece holds the window."""
    return read_us(batch) + max(max(r.context for r in batch.decodes) - WINDOW, 0) / 200


def shared_us(batch: Batch) -> float:
    """FlashAttention 3 shares processors out by all keys: uneven requests take longer."""
    contexts = [r.context for r in batch.decodes]
    return read_us(batch) * (0.8 + 0.2 * max(contexts) / float(np.mean(contexts)))


@pytest.mark.parametrize("law", [read_us, pieces_us, shared_us])
def test_lengths_beyond_the_window_are_told_apart(law: Callable[[Batch], float]) -> None:
    points = [at(f"batch={batch.key}", law(batch)) for batch in EVEN + UNEVEN]
    predictor = fit_signature(WINDOWED, points).predictor
    held = [Batch.decode(n, c) for n in (1, 5, 14) for c in (800, 3000, 8192)]
    held += [two_lengths(n, c, 3 * c) for n in (5, 14) for c in (800, 3000)]
    error = np.abs(predictor.predict_batches(held).us / [law(batch) for batch in held] - 1)
    assert error.mean() < 0.03
    assert error.max() < 0.1


def test_what_grows_beyond_the_window_does_so_beyond_what_was_measured() -> None:
    points = [at(f"batch={batch.key}", pieces_us(batch)) for batch in EVEN]
    predictor = fit_signature(WINDOWED, points).predictor
    far = [Batch.decode(n, 32768) for n in (1, 8)]
    assert predictor.predict_batches(far).us == pytest.approx([pieces_us(b) for b in far], rel=0.1)
