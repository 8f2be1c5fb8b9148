"""Intervals: nine of ten new measurements lie in them, on known noise."""

from __future__ import annotations

import numpy as np
import pytest
from sample_records import ATTENTION, LINEAR, ROPE, SAMPLER, at, signature

from dooly_backend.database.records import Measurement, Signature
from dooly_backend.regression.compositions import COMPOSITIONS
from dooly_backend.regression.fitting import fit_signature, fit_signatures
from dooly_backend.regression.intervals import (
    HeldOut,
    Interval,
    Intervals,
    conformal_quantile,
)
from dooly_backend.regression.prediction import Prediction
from dooly_backend.regression.scalar import Code, compiled
from dooly_backend.workload import Batch


def test_the_quantile_makes_room_for_the_next_one() -> None:
    assert conformal_quantile(np.arange(1.0, 20.0)) == 18  # the 18th of 19: (19 + 1) * 0.9
    assert conformal_quantile(np.arange(1.0, 6.0)) == 5  # too few for 90%: the largest
    assert conformal_quantile(np.empty(0)) == 0


def test_the_quantile_counts_scores_by_their_weights() -> None:
    scores = np.arange(1.0, 20.0)
    assert conformal_quantile(scores, np.full(19, 2.0)) == 18  # 35.1 of 38
    assert conformal_quantile(scores, np.where(scores > 10, 0.1, 1.0)) == 18  # 10.71 of 10.9
    quiet = np.where(scores > 15, 0.01, 10.0)
    assert conformal_quantile(scores, quiet) == 14  # 135.9 of 150.04


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


def test_few_points_are_as_sure_as_alike_signatures_are() -> None:
    """Five points among signatures with 1% of noise: their own largest score decides little."""
    many, few = np.unique(np.geomspace(1, 4096, 25).astype(int)), np.array([1, 16, 128, 1000, 4096])
    held = np.array([3, 40, 300, 2000])
    others = [signature(f"Other{i}") for i in range(5)]
    inside: list[bool] = []
    widths: list[float] = []
    for seed in range(25):
        measured = {o: straight(many, 0.01, [seed, i]) for i, o in enumerate(others)}
        fitted = fit_signatures({**measured, LINEAR: straight(few, 0.01, [seed, 9])}, ["roofline"])
        prediction = fitted[LINEAR].predictor.predict({"num_tokens": held})
        us = np.array([m.median_us for m in straight(held, 0.01, [seed, 10])])
        inside += covered(prediction, us).tolist()
        widths += (prediction.high_us / prediction.us - 1).tolist()
    assert 0.85 <= np.mean(inside) <= 0.98
    assert np.median(widths) < 0.03
    assert np.quantile(widths, 0.95) < 0.05


def straight(tokens: np.ndarray, scatter: float, seed: list[int]) -> list[Measurement]:
    """A straight line with relative scatter."""
    noise = np.random.default_rng(seed)
    us = (20 + 0.1 * tokens) * noise.lognormal(0, scatter, len(tokens))
    return [at(f"tokens={n}", t) for n, t in zip(tokens.tolist(), us.tolist(), strict=True)]


def covered(prediction: Prediction, us: np.ndarray) -> np.ndarray:
    return (prediction.low_us <= us) & (us <= prediction.high_us)


def composed(seed: int, shift: int = 0) -> list[Measurement]:
    """Prefills that scatter by 15%, and decodes that take as long and scatter by 1%."""
    noise = np.random.default_rng(seed)
    prefills = {f"batch=1x{n + shift}+{c}": 10 + 0.05 * (n + shift) for n in CHUNKS for c in PAST}
    decodes = {
        f"batch={r}x1+{c + shift}": 10 + 0.0005 * r * (c + shift) for r in (4, 16, 64) for c in KEYS
    }
    scatter = {**dict.fromkeys(prefills, 0.15), **dict.fromkeys(decodes, 0.01)}
    both = {**prefills, **decodes}
    return [at(key, us * noise.lognormal(0, scatter[key])) for key, us in both.items()]


CHUNKS, PAST = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048), (0, 256, 1024, 4096)
KEYS = tuple(np.geomspace(256, 4096, 16).astype(int).tolist())


def test_each_composition_has_intervals_of_its_own_errors() -> None:
    """Nine of ten of each; that of the quiet one is narrow though its times are the other's."""
    inside: dict[bool, list[bool]] = {True: [], False: []}
    widths: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(12):
        predictor = fit_signature(ATTENTION, composed(seed), ["roofline"]).predictor
        fresh = composed(100 + seed, 9)
        for decodes in (True, False):
            asked = [m for m in fresh if ("x1+" in m.point.key) is decodes]
            prediction = predictor.predict_points([m.point for m in asked])
            kept = ~prediction.extrapolated
            us = np.array([m.median_us for m in asked])
            inside[decodes] += covered(prediction, us)[kept].tolist()
            widths[decodes] += (prediction.high_us / prediction.us - 1)[kept].tolist()
    assert 0.85 <= np.mean(inside[True]) <= 0.95
    assert 0.85 <= np.mean(inside[False]) <= 0.95
    assert np.median(widths[True]) < 0.025
    assert np.median(widths[False]) > 0.2


def test_a_jump_between_two_points_leaves_the_others_sure() -> None:
    """As of a kernel that another replaces: the errors beside it are no one else's."""
    places, inside, one = np.arange(22.0), np.zeros(22, bool), np.zeros(22, int)
    errors = np.random.default_rng(0).uniform(0.005, 0.03, (4, 22))
    errors[0, [4, 5]] = 1.0
    learned = Intervals([HeldOut(places, each, inside, one) for each in errors])
    interval = Interval(learned.fit(0, 0.0))
    assert interval.many(np.arange(12.0, 22), False).max() < 0.07
    assert interval.many(np.array([4.0, 5.0]), False).min() > 0.15


def fitted_alone(places: np.ndarray, errors: np.ndarray, *compositions: int) -> dict:
    """The parameters of a signature's interval, of a kind without another signature."""
    codes = np.array(compositions or [0] * len(places))
    return Intervals([HeldOut(places, errors, np.zeros(len(places), bool), codes)]).fit(0, 0.0)


def test_a_constant_is_as_sure_as_its_samples() -> None:
    prediction = fit_signature(ROPE, [at("constant", 9.0, 10.0, 11.0)]).predictor.predict({})
    assert prediction.us == 10
    assert prediction.low_us < 9 < 11 < prediction.high_us
    assert not prediction.extrapolated


def half(
    interval: Interval, place: float, outside: bool, unfamiliar: bool, composition: int
) -> float:
    """What the interval writes for one row."""

    def write(code: Code) -> str:
        arguments = [code.feature(i) for i in range(4)]
        return interval.write(code, *arguments)

    return compiled(write)([place, outside, unfamiliar, composition])


def test_one_and_many_agree() -> None:
    errors = np.linspace(0.01, 0.2, 30)
    interval = Interval(fitted_alone(np.arange(30.0), errors, *([0, 2, 4] * 10)))
    places = np.array([-5.0, 0, 13.3, 12, 29, 99])
    outside = np.array([True, False, False, True, False, True])
    compositions = np.array([0, 4, 4, 1, 4, 2])  # none of 1 was held out
    many = interval.many(places, outside, ~outside, compositions)
    rows = zip(places.tolist(), outside.tolist(), compositions.tolist(), strict=True)
    np.testing.assert_allclose([half(interval, p, o, not o, c) for p, o, c in rows], many)
    assert many[1] < many[2] < many[4]


def test_one_and_many_batches_agree() -> None:
    predictor = fit_signature(ATTENTION, composed(0), ["roofline"]).predictor
    batches = ["1x100+0", "2x100+0", "8x1+700", "8x1+700,1x1+900", "8x1+700,1x100+0"]
    rows = predictor.rows([Batch.parse(each) for each in batches])
    together = predictor.predict_rows(rows)
    alone = [predictor.predict_row(row) for row in rows.tolist()]
    np.testing.assert_allclose([each.high_us for each in alone], together.high_us)
    codes = predictor._composer.many(rows).tolist()
    assert [COMPOSITIONS[code] for code in codes] == list(COMPOSITIONS)
    assert list(map(compiled(predictor._composer.write), rows.tolist())) == codes


TABLE = {"places": [1.0, 2.0], "half": [0.1, 0.1]}


@pytest.mark.parametrize(
    "changed",
    [
        {"places": [2.0, 1.0]},
        {"half": [1.0]},
        {"half": [0.1, -0.1]},
        {"places": [], "half": []},
        {"outside": None},
        {"compositions": {"waves": TABLE}},
        {"compositions": {"mixed": {**TABLE, "places": [2.0, 1.0]}}},
        {"compositions": {"mixed": {"places": [1.0]}}},
        {"compositions": 3},
    ],
)
def test_damaged_intervals_are_refused(changed: dict) -> None:
    Interval({**TABLE, "outside": 0.0, "compositions": {"mixed": TABLE}})
    with pytest.raises((ValueError, TypeError, KeyError)):
        Interval({**TABLE, "outside": 0.0, **changed})


def test_intervals_of_older_bundles_have_one_table() -> None:
    interval = Interval({**TABLE, "half": [0.1, 0.3], "outside": 0.0})
    assert half(interval, 1.5, False, False, 4) == pytest.approx(0.2)
    assert interval.many(np.array([1.5]), False, False, np.array([4])) == pytest.approx(0.2)


def test_requests_have_intervals_too() -> None:
    points = [at(f"requests={n}", 5 + 0.5 * n, 5.2 + 0.5 * n) for n in (1, 2, 4, 8, 16, 32)]
    prediction = fit_signature(SAMPLER, points).predictor.predict({"num_reqs": 5})
    assert prediction.low_us <= 7.6 <= prediction.high_us
