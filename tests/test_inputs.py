"""Arguments of operations for any step, from labels and formulas."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.errors import TraceError
from dooly_backend.operations.capture import captured
from dooly_backend.operations.inputs import (
    Shape,
    arguments,
    generated,
    shape_at,
    size_at,
    tensor,
    values,
)
from dooly_backend.operations.runnable import place, resolve
from dooly_backend.operations.tree import forest
from dooly_backend.tracing.labels import ENGINE, MODEL_CONFIG, NUM_REQS, NUM_TOKS, Dim, Label
from dooly_backend.tracing.sizes import traced_batch
from dooly_backend.tracing.trace import Affine, Operation, TensorSpec, Trace

T, R = 107, 11
TOKENS, REQUESTS = Dim(T, Label.of(NUM_TOKS, T)), Dim(R, Label.of(NUM_REQS, R))
WIDTH = Dim(576, Label.of(MODEL_CONFIG, 576))
MIX = Dim(9 * T, Label.of(NUM_TOKS, T) | Label.of(MODEL_CONFIG, 9))
OF_TOKENS, OF_WIDTH = Affine(0, 1, 0), Affine(576, 0, 0)


# -- sizes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dim", "formula", "size"),
    [
        (WIDTH, OF_WIDTH, 576),
        (TOKENS, OF_TOKENS, 5),
        (REQUESTS, Affine(1, 0, 1), 4),
        (MIX, Affine(0, 9, 0), 45),
        (Dim(963 + 576, MIX.label), Affine(576, 9, 0), 621),
        (Dim(112, TOKENS.label), Affine(0, 1, 0, 8), 8),  # rounded up to a multiple of 8
        (Dim(2), None, 2),  # nobody's: left alone
        (Dim(64, Label.of(ENGINE, 64)), None, 64),
    ],
)
def test_sizes_of_another_step(dim: Dim, formula: Affine | None, size: int) -> None:
    assert size_at(dim, formula, num_tokens=5, num_reqs=3) == size


def test_a_planned_size_is_refused() -> None:
    plan = Dim(4768, REQUESTS.label | Label.of(ENGINE, 4328))
    with pytest.raises(TraceError, match="no formula"):
        size_at(plan, None, 5, 3)


# -- layouts --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "strides", "sizes", "expected"),
    [
        ((TOKENS, WIDTH), (576, 1), (5, 576), (576, 1)),
        ((TOKENS, WIDTH), (960, 1), (5, 576), (960, 1)),  # a slice of the QKV projection
        ((WIDTH, TOKENS), (1, 576), (576, 5), (1, 576)),  # transposed
        ((Dim(9), TOKENS, Dim(64)), (T * 64, 64, 1), (9, 5, 64), (5 * 64, 64, 1)),
        ((Dim(9), TOKENS, Dim(64)), (64, 576, 1), (9, 5, 64), (64, 576, 1)),
        ((Dim(9), TOKENS), (T + 7, 1), (9, 5), (5 + 7, 1)),  # rows with a gap behind them
        ((TOKENS, WIDTH), (0, 1), (5, 576), (0, 1)),  # expanded
        ((Dim(1), TOKENS), (T, 1), (1, 5), (5, 1)),
    ],
)
def test_layouts_are_kept(
    dims: tuple[Dim, ...],
    strides: tuple[int, ...],
    sizes: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    assert shape_at(TensorSpec(dims, "float32", strides), sizes) == Shape(sizes, expected)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=4, max_size=4),
    st.randoms(use_true_random=False),
)
def test_a_dense_tensor_stays_dense(traced: list[int], other: list[int], random: Any) -> None:
    """In whatever order its dimensions lie."""
    order = list(range(len(traced)))
    random.shuffle(order)

    def dense(sizes: list[int]) -> tuple[int, ...]:
        strides, step = [0] * len(sizes), 1
        for i in order:
            strides[i], step = step, step * sizes[i]
        return tuple(strides)

    spec = TensorSpec(tuple(Dim(n) for n in traced), "float32", dense(traced))
    sizes = other[: len(traced)]
    if 1 in traced:  # where a dimension of size 1 lies cannot be told
        return
    assert shape_at(spec, sizes).strides == dense(sizes)


# -- values ---------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(1, 300))
def test_integers_stay_below_their_bound(count: int, bound: int) -> None:
    found = values(count, bound)
    assert len(found) == count
    assert all(0 <= value < bound for value in found)
    assert len(set(found)) == min(count, bound)


def test_tensors() -> None:
    spec = TensorSpec((TOKENS, WIDTH), "bfloat16", (960, 1))
    made = tensor(spec, Shape((5, 576), (960, 1)), None, "cpu")
    assert (made.dtype, made.shape, made.stride()) == (torch.bfloat16, (5, 576), (960, 1))
    assert made.float().abs().max() < 2
    indices = tensor(TensorSpec((TOKENS,), "int64", (1,)), Shape((5,), (1,)), bound=3, device="cpu")
    assert indices.dtype == torch.int64
    assert indices.max() < 3


def embedding() -> tuple[Operation, tuple[Affine | None, ...]]:
    weight = TensorSpec((Dim(50, WIDTH.label), WIDTH), "float32", (576, 1))
    places = TensorSpec((TOKENS,), "int64", (1,))
    rows = TensorSpec((TOKENS, WIDTH), "float32", (576, 1))
    formulas = (Affine(50, 0, 0), OF_WIDTH, OF_TOKENS, OF_TOKENS, OF_WIDTH)
    return Operation(0, "m", "aten::embedding.default", (weight, places), (rows,)), formulas


def test_weights_stay_and_indices_are_valid() -> None:
    operation, formulas = embedding()
    weight = torch.randn(50, 576)
    args, kwargs = generated(
        operation, formulas, 300, 3, ((weight, torch.zeros(7, dtype=torch.int64)), {})
    )
    assert args[0] is weight
    assert args[1].shape == (300,)
    assert torch.ops.aten.embedding.default(*args, **kwargs).shape == (300, 576)


def test_integers_of_the_request_are_computed_again() -> None:
    spec = TensorSpec((TOKENS, WIDTH), "float32", (576, 1))
    operation = Operation(
        0, "m", "aten::view.default", (spec,), (), (Dim(T, TOKENS.label), Dim(9), Dim(64))
    )
    formulas = (OF_TOKENS, OF_WIDTH, OF_TOKENS, Affine(9, 0, 0), Affine(64, 0, 0))
    args, _ = generated(operation, formulas, 5, 3, ((torch.randn(7, 576), [7, 9, 64]), {}))
    assert args[1] == [5, 9, 64]
    assert torch.ops.aten.view.default(*args).shape == (5, 9, 64)


def test_unknown_readers_of_integers_are_refused() -> None:
    """A wrong block number would not fail: it would read, or write, somewhere else."""
    slots = TensorSpec((TOKENS,), "int64", (1,))
    operation = Operation(0, "m", "_C::reshape_and_cache.default", (slots,), ())
    with pytest.raises(TraceError, match="no rule says which integers"):
        generated(operation, (OF_TOKENS,), 5, 3, ((torch.zeros(7, dtype=torch.int64),), {}))
    with pytest.raises(TraceError, match="other arguments"):
        generated(operation, (OF_TOKENS,), 5, 3, ((), {}))


# -- a real model ---------------------------------------------------------------


def test_they_are_those_of_a_step(engine: VllmEngine, trace: Trace) -> None:
    """Sizes and strides made for another step are those that the step has."""
    tops = {
        (node.path, ordinal): top
        for root in forest(trace)
        for node in root.walk()
        for top, ordinal in (place(node, op) for op in node.kernels)
    }
    tokens, requests = 61, 4
    assert tokens != trace.num_tokens
    assert requests != trace.num_reqs
    with captured(engine, traced_batch(tokens, requests), list(tops)) as calls:
        assert len(calls) == len(tops)
        embedding = next(c for c in calls if "embedding" in tops[c.path, c.ordinal].name)
        assert embedding.args[0] is engine.module("model.embed_tokens").weight  # not copied
        for call in calls:
            op = tops[call.path, call.ordinal]
            made = arguments(op, trace.formulas[op.index], tokens, requests)
            leaves = tree_leaves((call.args, dict(call.kwargs)))
            real = [t for t in leaves if isinstance(t, torch.Tensor)]
            assert made.tensors == tuple(Shape(tuple(t.size()), t.stride()) for t in real), op.name


def test_every_operation_entry_runs_with_them(engine: VllmEngine, trace: Trace) -> None:
    entries = resolve(trace, engine, prefer_operations=True).entries
    assert {e.captured for e in entries if e.granularity == "operation"} == {""}
