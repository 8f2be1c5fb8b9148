"""The taint algebra: Table 1 as laws, and merging and splitting of dimensions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dooly_backend.tracing.labels import (
    BASES,
    ENGINE,
    LITERAL,
    MODEL_CONFIG,
    NONE,
    NUM_REQS,
    NUM_TOKS,
    Dim,
    Label,
    Source,
    conflicts,
    labels_by_value,
    merge,
    split,
    view,
)

sources = st.builds(Source, st.sampled_from(BASES), st.integers(2, 200))
labels = st.lists(sources, max_size=4).map(
    lambda found: Label(frozenset(found)) | NONE  # joined once: literals are absorbed
)

TOKENS = Label.of(NUM_TOKS, 59)
REQUESTS = Label.of(NUM_REQS, 9)
HEADS = Label.of(MODEL_CONFIG, 8)
HIDDEN = Label.of(MODEL_CONFIG, 4096)
BLOCK = Label.of(ENGINE, 128)
TWO = Label.of(LITERAL, 2)


def names(shape: tuple[Dim, ...]) -> list[str]:
    return [dim.label.name for dim in shape]


# -- joining -----------------------------------------------------------------------------


@given(labels, labels, labels)
def test_joining_is_associative(a: Label, b: Label, c: Label) -> None:
    assert (a | b) | c == a | (b | c)


@given(labels, labels)
def test_joining_is_commutative(a: Label, b: Label) -> None:
    assert a | b == b | a


@given(labels)
def test_joining_is_idempotent_and_absorbs_nothing(a: Label) -> None:
    assert a | a == a
    assert a | NONE == a == NONE | a


@given(labels, labels)
def test_joining_loses_no_origin(a: Label, b: Label) -> None:
    """Only literals may disappear, beside something that is an origin."""
    lost = (a.bases | b.bases) - (a | b).bases
    assert lost <= {LITERAL}
    assert not lost or (a | b).bases


@pytest.mark.parametrize(
    ("left", "right", "name"),
    [
        (NONE, TOKENS, "num_toks"),  # absorption
        (TOKENS, TOKENS, "num_toks"),  # preservation
        (HEADS, HIDDEN, "model_config"),  # preservation, of two values
        (TOKENS, HEADS, "mix"),  # conflict
        (TOKENS | HEADS, REQUESTS, "mix"),  # extend
        (TOKENS | HEADS, REQUESTS | BLOCK, "mix"),  # merge
        (TWO, HEADS, "model_config"),  # a constant of a formula is no origin
        (TWO, NONE, "literal"),
    ],
)
def test_rows_of_table_1(left: Label, right: Label, name: str) -> None:
    joined = left | right
    assert joined.name == name
    assert set(joined.factors) >= {s.value for s in left.sources if s.base != LITERAL}
    if name == "mix":
        assert joined.factors == {**left.factors, **right.factors}


def test_a_label_needs_a_known_base() -> None:
    with pytest.raises(ValueError, match="no label base"):
        Label.of("hidden_size", 4096)


def test_labels_as_text() -> None:
    assert str(TOKENS | HEADS) == "mix(8: model_config, 59: num_toks)"
    assert str(Dim(59, TOKENS)) == "59:num_toks"
    assert str(NONE) == "none"


# -- merging and splitting ----------------------------------------------------------------


factors = st.lists(
    st.sampled_from([(59, NUM_TOKS), (9, NUM_REQS), (8, MODEL_CONFIG), (128, MODEL_CONFIG)]),
    min_size=1,
    max_size=3,
    unique=True,
)


@given(factors)
def test_splitting_recovers_what_was_merged(found: list[tuple[int, str]]) -> None:
    dims = tuple(Dim(size, Label.of(base, size)) for size, base in found)
    merged = merge(dims, math.prod(d.size for d in dims))
    assert merged.label.bases == {base for _, base in found}
    again = split(merged, [d.size for d in dims])
    assert [d.size for d in again] == [d.size for d in dims]
    assert names(again) == names(dims)


def test_a_product_in_a_mix_is_found_again() -> None:
    """[T, heads, size] flattened to one dimension and cut to [T, heads * size]."""
    shape = (Dim(59, TOKENS), Dim(8, HEADS), Dim(128, Label.of(MODEL_CONFIG, 128)))
    flat = view(shape, [59 * 8 * 128])
    assert names(flat) == ["mix"]
    assert names(view(flat, [59, 1024])) == ["num_toks", "model_config"]
    assert names(view(flat, [59 * 8, 128])) == ["mix", "model_config"]


def test_ones_carry_no_label() -> None:
    shape = (Dim(1), Dim(59, TOKENS), Dim(1))
    assert names(view(shape, [59])) == ["num_toks"]
    assert names(view((Dim(59, TOKENS),), [1, 59, 1])) == ["none", "num_toks", "none"]


def test_the_caller_decides_between_equal_factors() -> None:
    """A KV cache [blocks, block size, 2 * head size] with a block size of 64, and a head size, too.

    The caller says which part is the block's; the other is what remains.
    """
    block, double = Dim(64, Label.of(ENGINE, 64)), Dim(128, Label.of(MODEL_CONFIG, 128))
    given_sizes = [Dim(128, Label.of(ENGINE, 64)), Dim(64)]
    result = view((block, double), [128, 64], given_sizes)
    assert names(result) == ["engine", "model_config"]


@pytest.mark.parametrize(
    ("old", "new"),
    [([59, 4096], [59, 32, 128]), ([59, 32, 128], [59, 4096]), ([2, 3, 4], [4, 3, 2]),
     ([59, 8], [472]), ([6, 1, 4], [3, 8]), ([0, 4], [0, 2, 2]), ([7], [7, 1, 1])],
)  # fmt: skip
def test_views_have_the_sizes_asked_for(old: list[int], new: list[int]) -> None:
    shape = tuple(Dim(size, Label.of(MODEL_CONFIG, size) if size > 1 else NONE) for size in old)
    assert [d.size for d in view(shape, new)] == new


def test_a_view_keeps_the_element_count() -> None:
    with pytest.raises(ValueError, match="cannot be viewed"):
        view((Dim(6),), [4])


# -- the registry -------------------------------------------------------------------------


def test_values_of_two_origins() -> None:
    found = {Source(MODEL_CONFIG, 128), Source(ENGINE, 128), Source(ENGINE, 64),
             Source(NUM_REQS, 8), Source(MODEL_CONFIG, 8)}  # fmt: skip
    registry = labels_by_value(found)
    assert registry[128] == Label.of(MODEL_CONFIG, 128)
    assert registry[64] == Label.of(ENGINE, 64)
    assert 8 not in registry  # the request's or the model's: nobody knows
    assert conflicts(found) == {8: {NUM_REQS, MODEL_CONFIG}}
