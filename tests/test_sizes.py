"""Sizes of traced steps: never the model's, never on a line."""

from __future__ import annotations

from itertools import combinations, islice

import pytest

from dooly_backend.errors import TraceError
from dooly_backend.tracing.differential import solve
from dooly_backend.tracing.sizes import CONTEXT, collision_free_sizes, traced_batch

SMOLLM = {2, 3, 9, 64, 128, 192, 576, 960, 1536, 2048, 3072, 30, 49152}
LLAMA_70B = {8, 16, 28, 64, 80, 128, 1024, 8192, 10240, 28672, 57344, 128256, 131072, 5, 10}


@pytest.mark.parametrize("values", [SMOLLM, LLAMA_70B, set(), {2, 3, 4, 5, 6, 7, 8}])
def test_sizes_are_no_ones(values: set[int]) -> None:
    found = list(islice(collision_free_sizes(values, 2048, 64), 4))
    assert len(found) == 4
    for tokens, requests in found:
        assert not {tokens, tokens + 1, requests, requests + 1} & values
        for size in (tokens, requests):
            assert all(value % size for value in values if value > 1)
            assert all(size % value for value in values if value >= 8)
        assert 2 * CONTEXT < tokens < 2048
        assert 5 <= requests < CONTEXT  # the context of the decodes is no number of requests
        assert len({tokens, requests, CONTEXT, CONTEXT + 1, tokens - requests + 1}) == 5


@pytest.mark.parametrize("values", [SMOLLM, LLAMA_70B, set()])
def test_any_three_determine_a_formula(values: set[int]) -> None:
    found = list(islice(collision_free_sizes(values, 2048, 64), 6))
    for points in combinations(found, 3):
        formula = solve(points, [7 + 3 * t + 2 * r for t, r in points])  # raises on a line
        assert formula is not None
        assert (formula.constant, formula.tokens, formula.requests) == (7, 3, 2)


@pytest.mark.parametrize(
    ("values", "tokens", "requests"),
    [(set(), 62, 64), (set(), 2048, 6), (set(range(5, 60)), 2048, 64)],
)
def test_no_room_for_them(values: set[int], tokens: int, requests: int) -> None:
    with pytest.raises(TraceError, match=r"^no traced sizes [^\n]*raise max_num"):
        list(collision_free_sizes(values, tokens, requests))


@pytest.mark.parametrize(("tokens", "requests"), [(107, 11), (40, 2), (17, 1)])
def test_a_traced_step_is_mixed(tokens: int, requests: int) -> None:
    batch = traced_batch(tokens, requests)
    assert (batch.num_tokens, batch.num_reqs) == (tokens, requests)
    assert len(batch.prefills) == 1
    assert [request.context for request in batch.decodes] == [CONTEXT] * (requests - 1)
