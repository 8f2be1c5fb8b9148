"""Features: what of a batch a signature's time is predicted from."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dooly_backend.database.records import Signature
from dooly_backend.errors import InputError
from dooly_backend.regression import features
from dooly_backend.regression.batches import BatchArray, keys_seen
from dooly_backend.regression.features import (
    facts_of,
    feature,
    feature_names,
    features_of,
    known_features,
    matrix,
    point_matrix,
)
from dooly_backend.workload import Batch, Request, WorkloadPoint

requests = st.builds(Request, st.integers(1, 300), st.integers(0, 300))
batches = st.lists(requests, min_size=1, max_size=6).map(lambda r: Batch(tuple(r)))


def of_batch(text: str, **facts: float) -> dict[str, float]:
    row = matrix(features_of("batch"), BatchArray.of([Batch.parse(text)]), facts)[0]
    return dict(zip(feature_names("batch"), row.tolist(), strict=True))


def test_a_mixed_batch_by_hand() -> None:
    assert of_batch("1x100+50,1x10+0,1x1+40,1x1+9") == {
        "num_tokens": 112,
        "num_reqs": 4,
        "prefills": 2,
        "prefill_tokens": 110,
        "prefill_chunk_size": 100,
        "prefill_root_square": (100**2 + 10**2) ** 0.5,
        "prefill_history": 50,
        "prefill_query_context": 5000,
        "prefill_pairs": 100 * 50 + 5050 + 55,
        "prefill_keys": 160,
        "decodes": 2,
        "decode_keys": 41 + 10,
        "decode_context": 24.5,
        "decode_longest": 41,
        "decode_beyond": 0,
        "decode_unevenness": 41 / 25.5,
        "prefill_blocks": 2,
        "decode_blocks": 2,
    }


def test_a_sliding_window_limits_what_is_read() -> None:
    seen = of_batch("1x100+50,2x1+40", window=20.0)
    assert seen["prefill_pairs"] == 100 * 20
    assert seen["prefill_keys"] == 120
    assert seen["decode_keys"] == 40
    assert seen["prefill_query_context"] == 5000  # Vidur's: no window


def test_what_lies_beyond_a_window_is_told_too() -> None:
    uneven = of_batch("1x1+99,1x1+39", window=20.0)
    assert uneven["decode_beyond"] == 80
    assert uneven["decode_context"] == 69
    assert uneven["decode_unevenness"] == 100 / 70
    assert of_batch("2x1+9", window=20.0)["decode_beyond"] == 0


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 200))
def test_keys_seen_counts_pairs(query: int, context: int, window: int) -> None:
    pairs = sum(min(context + i, window) for i in range(1, query + 1))
    assert keys_seen(window, np.array([query]), np.array([context]))[0] == pairs


@given(st.lists(batches, min_size=1, max_size=5))
def test_many_batches_at_once_are_those_batches(many: list[Batch]) -> None:
    of_kind = features_of("batch")
    together = matrix(of_kind, BatchArray.of(many), {})
    alone = [matrix(of_kind, BatchArray.of([batch]), {})[0] for batch in many]
    np.testing.assert_array_equal(together, alone)


def test_points_of_a_mixture_tell_their_experts() -> None:
    of_kind = features_of("routing")
    facts = {"experts": 8.0, "top_k": 2.0}
    point = WorkloadPoint("routing", num_tokens=16, num_experts=3)
    assert point_matrix(of_kind, [point], facts).tolist() == [[16, 3]]
    expected = 8 * (1 - (1 - 2 / 8) ** 16)  # of a batch: every token draws at random
    rows = matrix(of_kind, BatchArray.of([Batch.prefill(16)]), facts)
    np.testing.assert_allclose(rows, [[16, expected]])


def test_facts_come_from_the_signature() -> None:
    def described(kind: str, **content: object) -> dict[str, float]:
        return facts_of(Signature("A", "module", kind, json.dumps(content)))  # type: ignore[arg-type]

    assert described("batch", attributes={"sliding_window": 4096}) == {"window": 4096}
    assert described("batch", attributes={"sliding_window": None}) == {}
    assert described("routing", routing={"experts": 8, "top_k": 2}) == {"experts": 8, "top_k": 2}
    assert facts_of(Signature("A", "module", "batch", "imported")) == {}


@pytest.mark.parametrize(
    ("query", "context", "starts"),
    [([1, 2], [3], [0]), ([1, 2], [0, 0], [0, 0]), ([0], [0], [0]), ([1], [-1], [0])],
)
def test_arrays_that_are_no_batches_are_refused(query: list, context: list, starts: list) -> None:
    with pytest.raises(InputError):
        BatchArray(query, context, starts)


# -- registering ---------------------------------------------------------------


@pytest.fixture
def registered() -> Iterator[str]:
    @feature("requests", "squared", "requests^2", "requests of the step, squared")
    def _squared(batches: BatchArray, facts: features.Facts) -> np.ndarray:
        return batches.num_reqs**2

    yield "squared"
    del features._FEATURES["requests"]["squared"]


def test_a_feature_can_be_added(registered: str) -> None:
    assert feature_names("requests") == ("num_reqs", registered)
    rows = matrix(features_of("requests"), BatchArray.of([Batch.decode(3, 8)]), {})
    assert rows.tolist() == [[3, 9]]


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="num_tokens"):
        feature("tokens", "num_tokens", "tokens", "again")(lambda batches, facts: batches.num_reqs)


def test_an_unknown_feature_is_named() -> None:
    with pytest.raises(InputError, match=r"unknown feature 'moon'.*known are num_tokens"):
        known_features("tokens", ["num_tokens", "moon"])
