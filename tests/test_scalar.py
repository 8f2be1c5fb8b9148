"""Predictions of one batch: the compiled lines say what the vectorised formulas say."""

from __future__ import annotations

import functools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import LINEAR, SAMPLER, at

from dooly_backend.database import Database
from dooly_backend.database.records import Signature
from dooly_backend.errors import InputError
from dooly_backend.regression.fitting import FittedSignature, fit_signature
from dooly_backend.regression.models import Predictor
from dooly_backend.regression.prediction import SignaturePredictor
from dooly_backend.regression.scalar import Code, compiled, literal
from dooly_backend.workload import Batch, Request

MOE = Signature("FusedMoE", "module", "routing", '{"routing": {"experts": 64, "top_k": 4}}')
#: Attention as it was measured on an H200: with what no made-up times have together.
ATTENTION = (
    ("Qwen/Qwen2-7B-Instruct", "FLASH_ATTN"),
    ("CohereLabs/c4ai-command-r7b-12-2024", "TRITON_ATTN"),
)


@functools.cache
def attention(model: str, backend: str, regressor: str) -> FittedSignature:
    with Database.open("builtin:h200") as database:
        (environment, *_) = database.environments()
        (number, *_) = (
            number
            for number, each in database.configurations().items()
            if (each.model, each.backend) == (model, backend)
        )
        signature = next(
            occurrence.signature
            for occurrence in database.occurrences(number, environment)
            if occurrence.signature.kind == "batch"
        )
        return fit_signature(
            signature, database.measurements(signature.hash, environment), [regressor]
        )


@functools.cache
def others(kind: str, regressor: str) -> FittedSignature:
    """Signatures that depend on a number or two."""
    places = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    if kind == "routing":
        points = [(t, e) for t in (1, 4, 16, 64, 256) for e in (4, 8, 16, 32, 64) if e <= 4 * t]
        return fit_signature(
            MOE, [at(f"routing={t}x{e}", 20 + 3.0 * e + 0.02 * t) for t, e in points], [regressor]
        )
    signature = {"tokens": LINEAR, "requests": SAMPLER}[kind]
    bent = [at(f"{kind}={n}", 20 + max(0.3 * n, 50) + (n % 3)) for n in places]
    return fit_signature(signature, bent, [regressor])


def agree(predictor: SignaturePredictor, rows: np.ndarray) -> None:
    """All that a prediction says, row by row and together, to the last digits."""
    together = predictor.predict_rows(rows)
    alone = [
        predictor.predict(dict(zip(predictor.feature_names, row, strict=True)))
        for row in rows.tolist()
    ]
    for name, many in zip(together._fields, together, strict=True):
        one = [getattr(each, name) for each in alone]
        np.testing.assert_allclose(one, many, rtol=1e-12, err_msg=name)
    assert {type(value) for each in alone for value in each} <= {float, bool}
    assert [each.extrapolated for each in alone] == together.extrapolated.tolist()


#: Also longer than anything that was measured, and short enough for every edge of a table.
lengths = st.integers(1, 300) | st.integers(1, 200_000)
prefills = st.builds(Request, lengths.map(lambda n: n + 1), st.just(0) | lengths)
decodes = st.builds(Batch.decode, st.integers(1, 600), lengths)
parts = prefills.map(lambda request: Batch((request,))) | decodes
batches = st.lists(parts, min_size=1, max_size=4).map(lambda some: sum(some[1:], some[0]))


@pytest.mark.parametrize(("model", "backend"), ATTENTION)
@pytest.mark.parametrize("regressor", ["corrected", "roofline", "interpolation-batch"])
@settings(deadline=None)
@given(st.lists(batches, min_size=1, max_size=20))
def test_attention_of_one_batch_and_of_many(
    model: str, backend: str, regressor: str, some: list[Batch]
) -> None:
    predictor = attention(model, backend, regressor).predictor
    agree(predictor, predictor.rows(some))


@pytest.mark.parametrize(("model", "backend"), ATTENTION)
def test_every_number_of_decodes(model: str, backend: str) -> None:
    """Where a kernel changes and where waves are full lies at one of them."""
    predictor = attention(model, backend, "corrected").predictor
    alone = [Batch.decode(number, context) for number in range(1, 300) for context in (700, 5000)]
    agree(predictor, predictor.rows([*alone, *(Batch.prefill(64, 0) + each for each in alone)]))


def test_that_attention_has_all_there_is() -> None:
    """Else the tests above would compare less than it says."""
    first, second = (attention(*each, "corrected").parameters for each in ATTENTION)
    assert first["mixed"] is not None
    assert second["mixed"] is not None
    assert second["joint"]["chain"] > 0 == first["joint"]["chain"]
    assert second["phases"]["decodes"]["switch"]["above"]["trend"]["waves"]["divided"]
    assert first["phases"]["decodes"]["trend"]["waves"]["divided"]
    assert not first["phases"]["prefills"]["trend"]["waves"]["divided"]


@pytest.mark.parametrize(
    ("kind", "regressor"),
    [
        *((kind, name) for kind in ("tokens", "requests") for name in ("corrected", "roofline")),
        *((kind, name) for kind in ("tokens", "requests") for name in ("isotonic", "forest")),
        *(("routing", name) for name in ("corrected", "roofline", "interpolation-routing")),
    ],
)
@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1, 5000), st.floats(4, 64)), min_size=1, max_size=20))
def test_numbers_one_by_one_and_together(
    kind: str, regressor: str, places: list[tuple[float, float]]
) -> None:
    predictor = others(kind, regressor).predictor
    agree(predictor, np.array(places)[:, : len(predictor.feature_names)])


def test_a_part_that_was_not_measured_is_an_error_here_too() -> None:
    points = [at(f"batch=1x{n}+{c}", 5.0 + n + c / 9) for n in (8, 64, 512) for c in (0, 99, 999)]
    predictor = fit_signature(
        Signature("Attention", "module", "batch", "{}"), points, ["roofline"]
    ).predictor
    (row,) = predictor.rows([Batch.parse("1x64+0")]).tolist()
    assert predictor.predict_row(row).us == pytest.approx(69, rel=0.1)
    (row,) = predictor.rows([Batch.parse("1x64+0,1x1+70")]).tolist()
    with pytest.raises(InputError, match="no measured decodes"):
        predictor.predict_row(row)


def test_lines_hold_numbers_and_nothing_else_of_a_bundle() -> None:
    assert literal(3) == "3.0"
    assert [literal(float(text)) for text in ("-0.0", "1e300", "inf", "nan")] == [
        "-0.0",
        "1e+300",
        "inf",
        "nan",
    ]

    class Shown(float):
        """A number that writes itself down as something else."""

        def __repr__(self) -> str:
            return "__import__('os')"

    assert literal(Shown(0.5)) == "0.5"
    assert literal(np.float64(0.5)) == "0.5"
    for wrong in ("__import__('os')", None, [1.0]):
        with pytest.raises(TypeError, match="expected a number"):
            literal(wrong)  # type: ignore[arg-type]
    assert compiled(lambda code: literal(float("-inf")))([]) == float("-inf")


def test_an_expression_is_worked_out_once_where_it_is_known() -> None:
    code = Code()
    feature = code.feature(0)
    result = code.let("0.0")
    with code.block(f"if {feature} > 0.0"):
        inner = code.once(f"log({feature})")
        assert code.once(f"log({feature})") == inner
        with code.block(f"if {feature} > 1.0"):
            assert code.once(f"log({feature})") == inner
            code.line(f"{result} = {inner}")
    with code.block("else"):
        assert code.once(f"log(-{feature})") != code.once(f"exp({feature})")
    outer = code.once(f"log({feature} + 9.0)")
    assert code.once(f"log({feature})") not in (inner, outer)  # `inner` has no value otherwise
    assert code.text(result).count("log(f0)") == 2


def test_what_was_compiled_is_left_behind_in_a_copy() -> None:
    """Fitted signatures go from process to process."""
    predictor = others("tokens", "corrected").predictor
    first = predictor.predict({"num_tokens": 100.0})
    predictor._predictor.one([100.0])
    assert pickle.loads(pickle.dumps(predictor)).predict({"num_tokens": 100.0}) == first


def test_a_predictor_without_lines_is_called() -> None:
    class Plain(Predictor):
        def many(self, rows: np.ndarray) -> np.ndarray:
            return rows[:, 0] * 2

    assert compiled(Plain().write)([4.0, 1.0]) == 8.0
