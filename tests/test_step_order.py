"""In which order an injected step holds its requests."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")

from engine_helpers import ATTENTION

from dooly_backend.engines.base import hooks
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.engines.vllm_steps import as_served
from dooly_backend.workload import Batch, Request

LENGTHS = tuple(range(40, 40 + 12 * 16, 16))
UNEVEN = Batch(tuple(Request(1, length) for length in LENGTHS))


def test_lengths_say_nothing_of_places() -> None:
    found = [request.context for request in as_served(UNEVEN.requests)]
    assert sorted(found) == sorted(LENGTHS)
    assert found not in (sorted(LENGTHS), sorted(LENGTHS, reverse=True))
    first, last = sum(found[:6]) / 6, sum(found[6:]) / 6
    assert 0.5 < first / last < 2.0


def test_equal_batches_have_equal_orders_and_prefills_keep_their_places() -> None:
    mixed = Batch.prefill(64, 8) + UNEVEN + Batch.prefill(32)
    shuffled = list(mixed.requests)
    random.Random(5).shuffle(shuffled)
    assert as_served(mixed.requests) == as_served(Batch.parse(mixed.key).requests)
    for before, after in zip(shuffled, as_served(shuffled), strict=True):
        assert before == after or (before.is_decode and after.is_decode)


def test_the_engine_runs_them_in_that_order(engine: VllmEngine) -> None:
    seen: list[list[int]] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        from vllm.forward_context import get_forward_context

        seen.append(get_forward_context().attn_metadata[ATTENTION[0]].seq_lens.tolist())

    handle = engine.modules[ATTENTION[0]].register_forward_pre_hook(look, with_kwargs=True)
    with hooks([handle]):
        engine.step(UNEVEN)
    wanted = [request.context + 1 for request in as_served(UNEVEN.requests)]
    assert [lengths[: len(wanted)] for lengths in seen] == [wanted]
