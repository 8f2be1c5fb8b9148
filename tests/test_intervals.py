"""Intervals: nine of ten new measurements lie in them, on known noise."""

from __future__ import annotations

import numpy as np
import pytest
from sample_records import LINEAR, ROPE, SAMPLER, at

from dooly_backend.database.records import Measurement, Signature
from dooly_backend.regression.fitting import fit_signature, fit_signatures
from dooly_backend.regression.intervals import (
    HeldOut,
    Interval,
    conformal_quantile,
    fit_interval,
)


def test_the_quantile_makes_room_for_the_next_one() -> None:
    assert conformal_quantile(np.arange(1.0, 20.0)) == 18  # the 18th of 19: (19 + 1) * 0.9
    assert conformal_quantile(np.arange(1.0, 6.0)) == 5  # too few for 90%: the largest
    assert conformal_quantile(np.empty(0)) == 0


def noisy(places: np.ndarray, seed: int) -> list[Measurement]:
    """Times whose relative scatter is 6% in short calls and 1% in long ones."""
    noise = np.random.default_rng(seed)
    scatter = np.where(places < 200, 0.06, 0.01)
    us = (20 + 0.1 * places) * noise.lognormal(0, scatter)
    return [at(f"tokens={n}", t) for n, t in zip(places.tolist(), us.tolist(), strict=True)]


def test_intervals_cover_nine_of_ten_and_follow_the_noise() -> None:
    """Over 30 databases of 25 points each, at other points than the fitted ones."""
    known = np.unique(np.geomspace(1, 4096, 25).astype(int))
    held = np.unique(np.geomspace(2, 4000, 40).astype(int))
    inside: list[bool] = []
    widths: list[np.ndarray] = []
    for seed in range(30):
        predictor = fit_signature(LINEAR, noisy(known, seed), ["interpolation"]).predictor
        prediction = predictor.predict({"num_tokens": held})
        us = np.array([m.median_us for m in noisy(held, 1000 + seed)])
        inside += ((prediction.low_us <= us) & (us <= prediction.high_us)).tolist()
        widths.append(prediction.high_us / prediction.us - 1)
    assert 0.85 < np.mean(inside) < 0.97
    width = np.mean(widths, axis=0)
    assert width[held > 1000].max() < 0.5 * width[held < 50].min()


def test_beyond_the_measured_range_they_are_wider() -> None:
    known = np.unique(np.geomspace(1, 4096, 25).astype(int))
    predictor = fit_signature(LINEAR, noisy(known, 0)).predictor
    prediction = predictor.predict({"num_tokens": np.array([4000, 4097])})
    width = np.log(prediction.high_us / prediction.low_us)
    assert prediction.extrapolated.tolist() == [False, True]
    assert width[1] >= 2 * width[0]


def test_signatures_with_few_points_borrow_the_scores_of_their_kind() -> None:
    known = np.unique(np.geomspace(1, 4096, 25).astype(int))
    other = Signature("Other", "module", "tokens", '{"name": "Other"}')
    alone = fit_signature(other, noisy(known[[5]], 0)).predictor
    fitted = fit_signatures({LINEAR: noisy(known, 0), other: noisy(known[[5]], 0)})
    row = {"num_tokens": int(known[5])}
    before, after = alone.predict(row), fitted[other].predictor.predict(row)
    assert before.low_us == before.us  # one sample: it cannot know better
    assert 0.8 < after.low_us / after.us < 0.99


def test_a_constant_is_as_sure_as_its_samples() -> None:
    prediction = fit_signature(ROPE, [at("constant", 9.0, 10.0, 11.0)]).predictor.predict({})
    assert prediction.us == 10
    assert prediction.low_us < 9 < 11 < prediction.high_us
    assert not prediction.extrapolated


def test_one_and_many_agree() -> None:
    held = HeldOut(np.arange(30.0), np.linspace(0.01, 0.2, 30), np.zeros(30, dtype=bool))
    interval = Interval(fit_interval(held, np.ones(1), np.ones(1), 0.0))
    places = np.array([-5.0, 0, 3.3, 12, 29, 99])
    outside = np.array([True, False, False, True, False, True])
    many = interval.many(places, outside)
    one = [interval.one(p, o) for p, o in zip(places.tolist(), outside.tolist(), strict=True)]
    np.testing.assert_allclose(one, many)
    assert many[1] < many[2] < many[4]


@pytest.mark.parametrize("changed", [{"places": [2.0, 1.0]}, {"half": [1.0]}, {"outside": None}])
def test_damaged_intervals_are_refused(changed: dict) -> None:
    parameters = {"places": [1.0, 2.0], "half": [0.1, 0.1], "outside": 0.0}
    with pytest.raises((ValueError, TypeError)):
        Interval({**parameters, **changed})


def test_requests_have_intervals_too() -> None:
    points = [at(f"requests={n}", 5 + 0.5 * n, 5.2 + 0.5 * n) for n in (1, 2, 4, 8, 16, 32)]
    prediction = fit_signature(SAMPLER, points).predictor.predict({"num_reqs": 5})
    assert prediction.low_us <= 7.6 <= prediction.high_us
