"""Who is fastest at which length, on made data whose right answer is worked out here."""

from __future__ import annotations

import math

import pytest

from integration.per_batch.inversions import (
    Inversion,
    Time,
    crossings,
    fastest,
    inversions,
    lost,
    winners,
)

Made = dict[int, dict[str, Time]]


def curves(noise: float = 0.0, **times: dict[int, float]) -> Made:
    """Times by length from times by configuration; all have the same noise."""
    lengths = sorted({length for of in times.values() for length in of})
    return {
        length: {name: Time(of[length], noise) for name, of in times.items() if length in of}
        for length in lengths
    }


#: B costs less a token, and more once: equal at 800 tokens.
LENGTHS = (100, 200, 400, 800, 1600)
A = {n: 100.0 + n for n in LENGTHS}
B = {n: 500.0 + 0.5 * n for n in LENGTHS}


def test_noise_is_two_standard_errors_of_the_difference() -> None:
    # sqrt(3^2 + 4^2) = 5: a difference of 10 is noise, one above it is not.
    assert not Time(100, 3).beats(Time(110, 4))
    assert Time(100, 3).beats(Time(110.1, 4))
    assert not Time(110.1, 4).beats(Time(100, 3))
    times = {"a": Time(100, 3), "b": Time(104, 3), "c": Time(130, 3)}
    assert winners(times) == {"a", "b"}
    assert fastest(times) == "a"
    assert lost(times, "c") == pytest.approx(30)


def test_an_inversion_and_its_prediction() -> None:
    live = curves(a=A, b=B | {800: 890.0, 1600: 1200.0})
    # Predicted to be equal at 700, which also lies between 400 and 800.
    predicted = curves(a=A, b={n: 450.0 + 0.5 * n for n in LENGTHS})
    (found,) = inversions(live, predicted)
    assert (found.before, found.after, found.low, found.high) == ("a", "b", 400, 800)
    # In logarithms: from log(500/700) at 400 to log(900/890) at 800.
    low, high = math.log(500 / 700), math.log(900 / 890)
    assert found.live == pytest.approx(400 * 2 ** (-low / (high - low)))
    low, high = math.log(500 / 650), math.log(900 / 850)
    assert found.predicted == pytest.approx(400 * 2 ** (-low / (high - low)))
    assert found.verdict == "predicted"


def test_noise_on_the_way_widens_the_range() -> None:
    # At 400 and 800 A and B differ by less than 2 * sqrt(2) * 60 = 170.
    live = curves(60.0, a=A, b={100: 550.0, 200: 600.0, 400: 620.0, 800: 850.0, 1600: 1300.0})
    (found,) = inversions(live, curves(a=A, b=B))
    assert (found.low, found.high, found.verdict) == (200, 1600, "predicted")
    assert 400 < found.live < 800


def test_of_several_crossings_in_noise_the_one_that_is_contradicted_least() -> None:
    level = dict.fromkeys((1, 2, 4, 8, 16, 32), 100.0)
    other = {1: 200.0, 2: 95.0, 4: 105.0, 8: 105.0, 16: 105.0, 32: 50.0}
    live = curves(5.0, a=level, b=other)
    (found,) = inversions(live, live)
    assert (found.low, found.high) == (1, 32)
    # A crossing below 2 has three lengths against it, that above 16 only the length 2.
    low, high = math.log(100 / 105), math.log(2)
    assert found.live == pytest.approx(16 * 2 ** (-low / (high - low)))


def test_noise_hides_an_inversion() -> None:
    times = {"a": A, "b": {n: 500.0 + 0.5 * n + 10 for n in LENGTHS}}
    assert len(inversions(curves(a=times["a"], b=times["b"]), curves(**times))) == 1
    # At 1600 B is ahead by 390: with standard errors of 140 each that is not told.
    assert inversions(curves(140.0, **times), curves(**times)) == []


def test_none() -> None:
    above = {n: us + 50 for n, us in A.items()}
    live = curves(1.0, a=A, b=above)
    assert inversions(live, curves(a=A, b=B)) == []  # that a prediction alone has is none


def test_predicted_at_another_length() -> None:
    live = curves(a=A, b=B | {800: 890.0})
    # Predicted to be equal at 200: at 400, where A is faster live, B is already ahead.
    early = curves(a=A, b={n: 200.0 + 0.5 * n for n in LENGTHS})
    (found,) = inversions(live, early)
    assert (found.low, found.high, found.verdict) == (400, 800, "elsewhere")
    assert found.predicted == pytest.approx(200)


def test_not_predicted() -> None:
    (found,) = inversions(curves(a=A, b=B), curves(a=A, b={n: us + 900 for n, us in A.items()}))
    assert (found.predicted, found.verdict) == (None, "not predicted")


def test_the_other_direction_is_no_prediction() -> None:
    (found,) = inversions(curves(a=A, b=B), curves(a=B, b=A))
    assert (found.before, found.predicted, found.verdict) == ("a", None, "not predicted")


def test_only_winners_change_places() -> None:
    """B and C cross behind A, which stays ahead; nothing of that is an inversion."""
    ahead = {n: 50.0 for n in LENGTHS}
    assert inversions(curves(a=ahead, b=A, c=B), curves(a=ahead, b=A, c=B)) == []


def test_three_that_take_turns() -> None:
    """A, then C, then B: A and B cross while C is ahead, and are no pair of winners."""
    middle = {100: 400.0, 200: 290.0, 400: 300.0, 800: 700.0, 1600: 1900.0}
    last = {100: 900.0, 200: 800.0, 400: 510.0, 800: 600.0, 1600: 700.0}
    live = curves(1.0, a=A, b=last, c=middle)
    found = inversions(live, live)
    assert [(each.before, each.after, each.low, each.high) for each in found] == [
        ("a", "c", 100, 200),
        ("c", "b", 400, 800),
    ]
    assert {each.verdict for each in found} == {"predicted"}


def test_two_that_are_level_both_change_places_with_a_third() -> None:
    twin = {n: us + 1 for n, us in A.items()}
    found = inversions(curves(5.0, a=A, twin=twin, b=B), curves(a=A, twin=twin, b=B))
    # At 800 all three are level.
    assert [(each.before, each.after, each.low, each.high) for each in found] == [
        ("a", "b", 400, 1600),
        ("twin", "b", 400, 1600),
    ]


def test_what_has_no_prediction_is_left_out() -> None:
    live = curves(a=A, b=B)
    assert inversions(live, curves(a=A)) == []
    without_ends = {n: us for n, us in B.items() if n in (200, 1600)}
    (found,) = inversions(live, curves(a=A, b=without_ends))
    assert isinstance(found, Inversion)
    assert (found.low, found.high) == (200, 1600)


def test_crossings_are_told_by_direction() -> None:
    waves = curves(a={1: 1.0, 10: 4.0, 100: 1.0}, b={1: 2.0, 10: 2.0, 100: 2.0})
    # From ratio 1/2 to 2: in the middle of the logarithms of 1 and 10; and back.
    assert crossings(waves, "a", "b") == pytest.approx([math.sqrt(10)])
    assert crossings(waves, "b", "a") == pytest.approx([10 * math.sqrt(10)])
