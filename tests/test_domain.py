"""The measured range, and how measured batches were composed."""

from __future__ import annotations

import numpy as np
import pytest
from sample_records import ATTENTION, at
from test_regressors import OF_KIND

from dooly_backend.regression.batches import BatchArray
from dooly_backend.regression.domain import Domain, domain_of
from dooly_backend.regression.features import features_of, matrix
from dooly_backend.regression.fitting import fit_signature, training_of
from dooly_backend.regression.scalar import compiled
from dooly_backend.workload import Batch

COMPOSED = ("2x512+0", "1x512+0,4x1+512", "3x1+512,1x1+2048")


def domain(*more: str) -> Domain:
    """Of a grid of single prefills and equal decodes, and more batches."""
    points = OF_KIND[ATTENTION] + [at(f"batch={text}", 10.0) for text in more]
    data = training_of(ATTENTION, points)
    return Domain("batch", domain_of(data), data.features)


def rows(*texts: str) -> np.ndarray:
    return matrix(features_of("batch"), BatchArray.of(map(Batch.parse, texts)), {})


@pytest.mark.parametrize(
    ("text", "outside"),
    [
        ("1x4096+8192", False),
        ("1x4096+8193", True),  # a longer history
        ("1x15+0", True),  # a smaller chunk
        ("1x4097+0", True),
        ("4x1024+0", False),
        ("5x1024+0", True),  # more new tokens than any step had
        ("256x1+8192", False),
        ("257x1+64", True),
        ("1x1+63", True),
        ("200x1+64,1x1+8193", True),  # one longer than any was
        ("1x512+0,1x1+9000", True),  # the decode is outside, whatever the prefill
    ],
)
def test_what_lies_outside(text: str, outside: bool) -> None:
    row = rows(text)
    assert domain().outside(row).tolist() == [outside]
    assert compiled(domain().write_outside)(row[0].tolist()) is outside


def test_compositions_that_were_not_measured_are_unfamiliar() -> None:
    every = rows("1x512+0", "8x1+512", *COMPOSED)
    plain = domain()
    assert plain.unfamiliar(every).tolist() == [False, False, True, True, True]
    is_unfamiliar = compiled(plain.write_unfamiliar)
    assert [is_unfamiliar(row) for row in every.tolist()] == plain.unfamiliar(every).tolist()
    assert not plain.outside(every).any()
    assert not domain(*COMPOSED).unfamiliar(every).any()


def test_they_are_less_sure() -> None:
    predictor = fit_signature(ATTENTION, OF_KIND[ATTENTION]).predictor
    prediction = predictor.predict_batches([Batch.parse(COMPOSED[0])])
    (alike,) = predictor._interval.many(prediction.us, False, False, np.array([1]))
    width = np.log(prediction.high_us / prediction.us)[0]
    assert width == pytest.approx(1.5 * alike)
    assert width > 0
