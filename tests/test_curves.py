"""Curves and surfaces through measured points."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import ATTENTION, at

from dooly_backend.errors import InputError
from dooly_backend.regression.baseline import signature_latency
from dooly_backend.regression.interpolate import Curve, Statistics, Surface
from dooly_backend.workload import Batch


def flat(median: float) -> Statistics:
    return Statistics(median, median, median, median, 0.0)


def attention(points: dict[str, float]) -> Callable[[str], tuple[float, bool, bool]]:
    """A batch's (median, measured, extrapolated), from measured batches."""
    model = signature_latency(ATTENTION, [at(f"batch={b}", us) for b, us in points.items()])

    def predict(text: str) -> tuple[float, bool, bool]:
        estimate, measured = model.at(Batch.parse(text))
        return estimate.statistics.median_us, measured, estimate.extrapolated

    return predict


def grid(work: Callable[[int, int], float], longest: int = 4096) -> dict[str, float]:
    """Prefills and decodes that fit `longest`: a triangle, as max_model_len cuts it."""
    points = {}
    for chunk in (16, 128, 512, 1024, 2048, 4096):
        for history in (0, 512, 1024, 2048):
            if chunk + history <= longest:
                points[f"1x{chunk}+{history}"] = work(chunk, history)
    for count in (1, 4, 16):
        for context in (16, 512, 4095):
            points[f"{count}x1+{context}"] = work(count, context)
    return points


# -- curves

times = st.floats(0.001, 1e7)
# min <= mean <= median <= max, as good as any order between the middle two
statistics = st.lists(times, min_size=5, max_size=5).map(
    lambda values: Statistics(*sorted(values[:4]), values[4])
)
curves = st.dictionaries(st.integers(1, 10_000).map(float), statistics, min_size=1, max_size=8)


@settings(deadline=None)
@given(curves)
def test_a_curve_is_exact_where_it_is_measured(points: dict[float, Statistics]) -> None:
    curve = Curve(points)
    for place, values in points.items():
        assert curve.at(place) == (values, False)


@settings(deadline=None)
@given(curves.filter(lambda points: len(points) > 1), st.data())
def test_a_curve_stays_between_its_neighbours(points: dict[float, Statistics], data) -> None:
    places = sorted(points)
    index = data.draw(st.integers(0, len(places) - 2))
    low, high = places[index], places[index + 1]
    one, other = sorted(data.draw(st.tuples(st.floats(low, high), st.floats(low, high))))
    curve = Curve(points)
    first, second = curve.at(one), curve.at(other)
    assert not first.extrapolated
    assert not second.extrapolated
    for a, b, x, y in zip(
        points[low], points[high], first.statistics, second.statistics, strict=True
    ):
        assert min(a, b) <= x <= max(a, b)
        # monotone, up to rounding, in the direction of the neighbours
        assert (y - x) * (b - a) >= -1e-9 * max(a, b) ** 2


@settings(deadline=None)
@given(curves, st.floats(1e4, 1e6))
def test_beyond_its_end_a_curve_never_falls(points: dict[float, Statistics], place: float) -> None:
    end = points[max(points)]
    estimate = Curve(points).at(place + 1)
    assert estimate.extrapolated
    assert estimate.statistics.median_us >= end.median_us
    values = estimate.statistics
    assert values.min_us <= values.median_us <= values.max_us
    assert values.min_us <= values.mean_us <= values.max_us


def test_a_curve_between_below_and_above() -> None:
    curve = Curve({16: flat(10), 32: flat(18), 64: flat(50)})
    assert curve.at(24) == (flat(14), False)
    assert curve.at(48) == (flat(34), False)
    assert curve.at(1) == (flat(10), True)
    assert curve.at(128) == (flat(50 + 64), True)  # the slope of the last two points


def test_all_statistics_are_interpolated() -> None:
    curve = Curve({0: Statistics(1, 3, 2, 9, 0.5), 10: Statistics(2, 5, 4, 19, 1.5)})
    assert curve.at(5).statistics == Statistics(1.5, 4, 3, 14, 1.0)


def test_noise_at_the_end_of_a_curve_does_not_make_it_fall() -> None:
    assert Curve({16: flat(10), 32: flat(9)}).at(3200) == (flat(9), True)


# -- attention


BILINEAR = attention(grid(lambda size, context: 5 + size + size * context / 100))


@settings(deadline=None)
@given(st.integers(16, 4096), st.integers(0, 2048))
def test_a_surface_is_exact_for_what_is_bilinear(chunk: int, history: int) -> None:
    """chunk * history is reproduced everywhere, in the holes of the grid too."""
    median, _, _ = BILINEAR(f"1x{chunk}+{history}")
    assert median == pytest.approx(5 + chunk + chunk * history / 100)


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(16, 4095))
def test_decodes_between_measured_ones(count: int, context: int) -> None:
    median, _, extrapolated = BILINEAR(f"{count}x1+{context}")
    assert median == pytest.approx(5 + count + count * context / 100)
    assert not extrapolated


@settings(deadline=None)
@given(st.integers(16, 4096), st.integers(0, 2048))
def test_a_surface_stays_within_what_surrounds_it(chunk: int, history: int) -> None:
    points = grid(lambda size, context: size**1.3 * math.sqrt(100 + context), longest=10_000)
    median, _, extrapolated = attention(points)(f"1x{chunk}+{history}")
    sizes, contexts = (16, 128, 512, 1024, 2048, 4096), (0, 512, 1024, 2048)
    low = max(s for s in sizes if s <= chunk), max(c for c in contexts if c <= history)
    high = min(s for s in sizes if s >= chunk), min(c for c in contexts if c >= history)
    corners = [points[f"1x{s}+{c}"] for s in (low[0], high[0]) for c in (low[1], high[1])]
    assert min(corners) - 1e-9 <= median <= max(corners) + 1e-9
    assert not extrapolated


def test_outside_the_grid_is_extrapolated_and_says_so() -> None:
    predict = BILINEAR
    assert predict("1x1024+3000") == (pytest.approx(5 + 1024 + 10.24 * 3000), False, True)
    assert predict("1x8192+0") == (pytest.approx(5 + 8192), False, True)
    assert predict("32x1+512") == (pytest.approx(5 + 32 + 32 * 5.12), False, True)
    assert predict("1x4+0") == (pytest.approx(5 + 16), False, True)  # clamped below
    assert predict("1x1024+512")[1:] == (True, False)


def test_a_chunk_measured_at_one_history_takes_its_neighbour_s_slope() -> None:
    surface = Surface({(1024, 0): flat(100), (1024, 1024): flat(150), (2048, 0): flat(300)})
    estimate = surface.at(2048, 1024)
    assert estimate == (flat(300 + 2 * 50), True)  # twice the tokens, twice the slope


def test_decodes_of_different_lengths_count_at_their_mean() -> None:
    predict = attention(grid(lambda size, context: size * context))
    assert predict("1x1+100,1x1+300,2x1+600") == (pytest.approx(4 * 400), False, False)


def test_a_mixed_batch_is_the_sum_of_its_parts() -> None:
    predict = BILINEAR
    one, other = predict("1x200+100")[0], predict("1x700+0")[0]
    decodes = predict("3x1+700")[0]
    assert predict("2x200+100,1x700+0,3x1+700")[0] == pytest.approx(2 * one + other + decodes)


def test_a_measured_batch_wins_over_the_sum() -> None:
    points = grid(lambda size, context: 5 + size + size * context / 100)
    mixed = {"2x128+0,8x1+512": 123.0, "2x128+0": 77.0}
    predict = attention(points | mixed)
    assert predict("8x1+512,2x128+0") == (123.0, True, False)
    assert predict("2x128+0") == (77.0, True, False)
    assert predict("3x128+0") == (pytest.approx(3 * (5 + 128)), False, False)
    assert not predict("2x128+0,8x1+511")[1]


def test_spreads_of_parts_add_as_squares() -> None:
    points = [at("batch=1x8+0", 9.0, 15.0), at("batch=1x1+8", 6.0, 14.0)]
    estimate, _ = signature_latency(ATTENTION, points).at(Batch.parse("1x8+0,1x1+8"))
    assert estimate.statistics == Statistics(15.0, 22.0, 22.0, 29.0, 5.0)


def test_attention_without_decodes_says_what_to_run() -> None:
    predict = attention({"1x16+0": 4.0})
    with pytest.raises(InputError, match="Attention has no measured decodes: run `dooly profile`"):
        predict("1x1+64")
    with pytest.raises(InputError, match="no measured prefills"):
        attention({"1x1+64": 4.0})("1x16+0")
