"""The differential check on small passes: formulas, repairs, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dooly_backend.errors import TraceError
from dooly_backend.tracing.differential import Pass, _formula, agrees, check, solve
from dooly_backend.tracing.labels import (
    ENGINE,
    LITERAL,
    MODEL_CONFIG,
    NONE,
    NUM_REQS,
    NUM_TOKS,
    Dim,
    Label,
)
from dooly_backend.tracing.trace import STEP, Affine, Operation, TensorSpec

POINTS = ((107, 11), (109, 14), (113, 15))
HELD_OUT = (131, 19)

TOKENS = Label.of(NUM_TOKS, 107)
REQUESTS = Label.of(NUM_REQS, 11)
MODEL = Label.of(MODEL_CONFIG, 576)


def operation(
    index: int,
    *dims: Dim,
    name: str = "aten::mul.Tensor",
    path: str = "model",
    scalars: tuple[Dim, ...] = (),
) -> Operation:
    tensor = TensorSpec(dims, "bfloat16", tuple(1 for _ in dims))
    return Operation(index, path, name, (), (tensor,), scalars)


def sized(size: int | Affine, point: tuple[int, int], label: Label) -> Dim:
    return Dim(size if isinstance(size, int) else size(*point), label)


def passes(*rows: tuple[int | Affine, Label]) -> tuple[Pass, list[Pass], Pass]:
    """One operation a row, with one dimension of this size, in all four passes."""

    def at(point: tuple[int, int]) -> Pass:
        ops = tuple(operation(i, sized(size, point, label)) for i, (size, label) in enumerate(rows))
        return Pass(*point, ops)

    labelled, *others = (at(point) for point in POINTS)
    return labelled, others, at(HELD_OUT)


# -- formulas -------------------------------------------------------------------


@given(
    st.integers(-500, 500),
    st.integers(-9, 9),
    st.integers(-9, 9),
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 60)), min_size=3, max_size=3),
)
def test_solving_finds_the_formula(
    constant: int, tokens: int, requests: int, points: list[tuple[int, int]]
) -> None:
    formula = Affine(constant, tokens, requests)
    (a, b), (c, d), (e, f) = points
    values = [formula(*point) for point in points]
    if (c - a) * (f - b) == (e - a) * (d - b):
        with pytest.raises(ValueError, match="line"):
            solve(points, values)
    else:
        assert solve(points, values) == formula


def test_sizes_without_whole_coefficients() -> None:
    assert solve([(10, 2), (20, 2), (10, 4)], [5, 10, 5]) is None  # T/2
    assert solve([(10, 2), (20, 2), (10, 4)], [10, 20, 11]) is None


@pytest.mark.parametrize(
    ("label", "formula", "agree"),
    [
        (TOKENS, Affine(0, 1, 0), True),
        (TOKENS, Affine(1, 9, 0), True),
        (TOKENS, Affine(0, 0, 1), False),
        (TOKENS, Affine(107, 0, 0), False),
        (TOKENS | REQUESTS, Affine(0, 1, 1), True),
        (TOKENS | REQUESTS, Affine(0, 1, 0), False),
        (TOKENS | MODEL, Affine(0, 9, 0), True),
        (MODEL, Affine(576, 0, 0), True),
        (NONE, Affine(3, 0, 0), True),
        (MODEL, Affine(0, 1, 0), False),
        (NONE, Affine(0, 0, 1), False),
    ],
)
def test_what_agrees(label: Label, formula: Affine, agree: bool) -> None:
    assert agrees(Dim(1, label), formula) is agree


# -- the check ------------------------------------------------------------------


def test_right_labels_stay() -> None:
    labelled, others, held_out = passes(
        (Affine(0, 1, 0), TOKENS), (576, MODEL), (Affine(1, 0, 1), REQUESTS)
    )
    result, formulas, operations = check(labelled, others, held_out)
    assert operations == labelled.operations
    assert (result.dimensions, result.predicted, result.agreeing, result.repaired) == (3, 3, 3, 0)
    assert result.accuracy == 1
    assert formulas == {0: (Affine(0, 1, 0),), 1: (Affine(576, 0, 0),), 2: (Affine(1, 0, 1),)}


def test_wrong_labels_are_counted_and_repaired() -> None:
    labelled, others, held_out = passes(
        (Affine(0, 1, 0), REQUESTS),  # mistaken for requests
        (107, TOKENS),  # a constant of the code that looked like T
        (Affine(0, 9, 0), Label.of(MODEL_CONFIG, 963)),  # heads times tokens
        (Affine(0, 1, 2), NONE),
        (576, MODEL),
    )
    result, _, operations = check(labelled, others, held_out)
    assert (result.agreeing, result.repaired) == (1, 4)
    assert result.accuracy == pytest.approx(0.2)
    labels = [dim.label for op in operations for dim in op.dims()]
    assert labels[0] == TOKENS
    assert labels[1] == Label.of(LITERAL, 107)
    assert labels[2].bases == {MODEL_CONFIG, NUM_TOKS}
    assert labels[3].bases == {NUM_TOKS, NUM_REQS}
    assert labels[4] == MODEL


def test_repairs_reach_inputs_outputs_and_scalars() -> None:
    def at(point: tuple[int, int]) -> Pass:
        dim = Dim(point[0], NONE)
        tensor = TensorSpec((dim, Dim(576, MODEL)), "bfloat16", (576, 1))
        op = Operation(0, "model", "aten::slice.Tensor", (tensor,), (tensor,), (Dim(1), dim))
        return Pass(*point, (op,))

    result, _, (op,) = check(at(POINTS[0]), [at(POINTS[1]), at(POINTS[2])], at(HELD_OUT))
    assert (result.dimensions, result.repaired) == (6, 3)
    names = [dim.label.name for dim in op.dims()]
    assert names == ["num_toks", "model_config"] * 2 + ["none", "num_toks"]


def test_engine_labels_survive_a_repair() -> None:
    label = Label.of(ENGINE, 64)
    labelled, others, held_out = passes((Affine(64, 0, 40), label))
    _, _, (op,) = check(labelled, others, held_out)
    assert next(op.dims()).label.bases == {ENGINE, NUM_REQS}


def test_a_size_that_only_the_held_out_pass_contradicts() -> None:
    labelled, others, _ = passes((Affine(0, 1, 0), TOKENS))
    other = Pass(*HELD_OUT, (operation(0, Dim(HELD_OUT[0] + 1)),))
    with pytest.raises(TraceError, match=r"aten::mul\.Tensor in model.*no affine function"):
        check(labelled, others, other)


def test_a_size_that_no_formula_gives() -> None:
    labelled, _, held_out = passes((Affine(0, 1, 0), TOKENS))
    others = [Pass(*point, (operation(0, Dim(point[0] ** 2)),)) for point in POINTS[1:]]
    with pytest.raises(TraceError, match="no affine function"):
        check(labelled, others, held_out)


def test_a_moe_layer_may_block_its_tokens_as_it_likes() -> None:
    def at(point: tuple[int, int], blocks: int, label: Label, path: str) -> Pass:
        return Pass(*point, (operation(0, Dim(blocks, label), name="aten::empty", path=path),))

    def run(label: Label, path: str, sizes: tuple[int, ...] = (162, 162, 163, 162)):
        labelled, *others, held_out = (
            at(point, size, label, path)
            for point, size in zip((*POINTS, HELD_OUT), sizes, strict=True)
        )
        return check(labelled, others, held_out, planning={"model.layers.0.mlp.experts"})

    mix = TOKENS | MODEL
    result, formulas, _ = run(mix, "model.layers.0.mlp.experts")
    assert (result.planned, result.agreeing, formulas[0]) == (1, 1, (None,))
    with pytest.raises(TraceError, match="no affine function"):
        run(mix, "model.layers.0.mlp.experts_gate")  # not inside
    with pytest.raises(TraceError, match="no affine function"):
        run(MODEL, "model.layers.0.mlp.experts")  # nothing says that the request decides it


def test_as_many_blocks_in_all_passes_are_no_constant() -> None:
    """Steps of some tokens more or less may be divided alike."""

    def run(label: Label, path: str) -> tuple[Affine | None, Label]:
        labelled, *others, held_out = (
            Pass(*point, (operation(0, Dim(69, label), name="aten::empty", path=path),))
            for point in (*POINTS, HELD_OUT)
        )
        result, formulas, (op,) = check(labelled, others, held_out, planning={"mlp.experts"})
        assert result.planned == (formulas[0] == (None,))
        return formulas[0][0], next(op.dims()).label

    mix = TOKENS | MODEL
    assert run(mix, "mlp.experts") == (None, mix)
    assert run(MODEL, "mlp.experts") == (Affine(69, 0, 0), MODEL)
    formula, label = run(mix, "mlp.gate")  # not inside: the label is wrong
    assert (formula, label) == (Affine(69, 0, 0), MODEL)


def test_passes_that_differ() -> None:
    labelled, others, held_out = passes((Affine(0, 1, 0), TOKENS), (576, MODEL))
    renamed = operation(1, Dim(576), name="aten::add.Tensor")
    moved = operation(1, Dim(576), path="model.norm")
    wider = operation(1, Dim(576), Dim(4))
    for second, message in (
        (renamed, r"diverge at aten::mul\.Tensor in model: .*aten::add"),
        (moved, "diverge"),
        (wider, "other arguments"),
    ):
        other = Pass(*HELD_OUT, (held_out.operations[0], second))
        with pytest.raises(TraceError, match=message):
            check(labelled, others, other)
    shorter = Pass(*HELD_OUT, held_out.operations[:1])
    with pytest.raises(TraceError, match="only one of the passes runs"):
        check(labelled, others, shorter)
    with pytest.raises(TraceError, match="only one of the passes runs"):
        check(Pass(*POINTS[0], labelled.operations[:1]), others, held_out)


def test_input_preparation_may_differ() -> None:
    """It may run an operation for each request: it is no part of the modules."""
    labelled, others, held_out = passes((Affine(0, 1, 0), TOKENS))
    extra = operation(1, Dim(11), path=STEP)
    with_step = Pass(*POINTS[0], (*labelled.operations, extra))
    result, formulas, operations = check(with_step, others, held_out)
    assert result.dimensions == 1
    assert set(formulas) == {0}
    assert operations[1] == extra


def test_padded_requests_are_found_where_the_tokens_round_up_alike():
    # FlashAttention 3's scheduler metadata on a GPU: two numbers for each request,
    # requests rounded up to fours, and one more.
    passes = [Pass(t, r, ()) for t, r in ((59, 7), (59, 11), (60, 7), (64, 10))]
    assert _formula(passes, (17, 25, 17, 25)) == Affine(1, 0, 2, 4)
    assert _formula(passes, (17, 25, 17, 27)) is None
