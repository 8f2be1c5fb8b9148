from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dooly_backend.errors import InputError
from dooly_backend.workload import Batch, PointKind, Request, WorkloadPoint

requests = st.builds(Request, st.integers(1, 5000), st.integers(0, 5000))
# Few different requests, so that runs of equal ones are common.
batches = st.lists(requests, min_size=1, max_size=4).flatmap(
    lambda few: st.lists(st.sampled_from(few), min_size=1, max_size=12).map(
        lambda chosen: Batch(tuple(chosen))
    )
)
kinds = st.sampled_from(["constant", "tokens", "requests", "batch"])


@settings(deadline=None)
@given(batches)
def test_a_batch_comes_back_from_its_key(batch: Batch) -> None:
    assert Batch.parse(batch.key) == batch


@settings(deadline=None)
@given(batches, st.randoms())
def test_the_order_of_requests_does_not_matter(batch: Batch, random) -> None:
    shuffled = list(batch.requests)
    random.shuffle(shuffled)
    assert Batch(tuple(shuffled)).key == batch.key


@settings(deadline=None)
@given(batches, kinds)
def test_a_point_comes_back_from_its_key(batch: Batch, kind: PointKind) -> None:
    point = WorkloadPoint.of(kind, batch)
    assert WorkloadPoint.parse(point.key) == point


@settings(deadline=None)
@given(batches, batches)
def test_keys_are_equal_exactly_when_batches_are(one: Batch, other: Batch) -> None:
    assert (one.key == other.key) == (one == other)


@settings(deadline=None)
@given(batches)
def test_every_request_is_a_prefill_or_a_decode(batch: Batch) -> None:
    assert sorted(batch.prefills + batch.decodes, reverse=True) == list(batch.requests)
    assert all(request.query == 1 and request.context > 0 for request in batch.decodes)


def test_the_parts_of_a_batch() -> None:
    batch = Batch.prefill(128, count=2) + Batch.decode(8, 1024)
    assert batch.key == "2x128+0,8x1+1024"
    assert (batch.num_tokens, batch.num_reqs, batch.longest) == (264, 10, 1025)
    assert (len(batch.prefills), len(batch.decodes)) == (2, 8)


def test_one_token_without_context_is_a_prefill() -> None:
    assert Batch.prefill(1).prefills
    assert not Batch.prefill(1).decodes


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("constant", "constant"),
        ("tokens", "tokens=264"),
        ("requests", "requests=10"),
        ("batch", "batch=2x128+0,8x1+1024"),
    ],
)
def test_a_point_keeps_only_what_its_kind_depends_on(kind: PointKind, key: str) -> None:
    assert WorkloadPoint.of(kind, Batch.parse("8x1+1024,2x128+0")).key == key


def test_a_missing_count_is_one() -> None:
    assert Batch.parse("128+0, 1+64").key == "1x128+0,1x1+64"


@pytest.mark.parametrize("text", ["", "x", "0x5+0", "1x0+5", "128", "1x128+-1", "128+0,,1+5"])
def test_what_is_no_batch_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        Batch.parse(text)


@pytest.mark.parametrize("key", ["tokens", "tokens=", "tokens=-1", "constant=1", "size=3"])
def test_what_is_no_point_is_refused(key: str) -> None:
    with pytest.raises(InputError):
        WorkloadPoint.parse(key)
