"""Which configuration is fastest at which length, and where that changes beyond noise.

A *time* is what a configuration was measured to take, and its noise: the standard error
of that. One configuration *beats* another where its time is shorter by more than two standard
errors of the difference. The *winners* at a length are those that none beats: several
where noise does not tell them apart.

An *inversion* is a pair of configurations, A and B, and two lengths: at the first A is
a winner and beats B, at the next at which either beats the other B is a winner and
beats A. Somewhere between the two they change places; where noise hides that on
the way, the two lengths lie farther apart. It is *predicted* where the predicted times have
the same order at both lengths, so that they cross between them; else they cross
*elsewhere*, or not at all.

Where two curves cross between measured lengths is interpolated: the logarithm of their
ratio is taken to be linear in that of the length. Of several crossings within noise the one
is given that the times on both sides contradict least.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Generic, Literal, TypeVar

ERRORS = 2.0  # standard errors of a difference that is not noise

Name = TypeVar("Name", bound=Hashable)
Verdict = Literal["predicted", "elsewhere", "not predicted"]


@dataclass(frozen=True)
class Time:
    """Microseconds: what was measured, and the standard error of that."""

    us: float
    noise_us: float = 0.0

    def beats(self, other: Time) -> bool:
        return other.us - self.us > ERRORS * math.hypot(self.noise_us, other.noise_us)


#: Times by length and configuration; a configuration may lack lengths.
Curves = Mapping[int, Mapping[Name, Time]]


@dataclass(frozen=True)
class Inversion(Generic[Name]):
    """`before` beats `after` at the length `low`, and is beaten by it at `high`.

    `live` is where the measured curves cross, `predicted` where the predicted ones do,
    nearest to that; interpolated.
    """

    before: Name
    after: Name
    low: int
    high: int
    live: float
    predicted: float | None
    verdict: Verdict


def winners(times: Mapping[Name, Time]) -> frozenset[Name]:
    """Those that no other beats."""
    return frozenset(
        name for name, time in times.items() if not any(t.beats(time) for t in times.values())
    )


def inversions(live: Curves[Name], predicted: Curves[Name]) -> list[Inversion[Name]]:
    """Every inversion that `live` shows beyond noise, and whether `predicted` has it.

    By length; configurations that have no prediction are left out.
    """
    live = {
        length: {name: t for name, t in times.items() if name in predicted.get(length, {})}
        for length, times in sorted(live.items())
    }
    best = {length: winners(times) for length, times in live.items()}
    names = dict.fromkeys(name for times in live.values() for name in times)
    found = []
    for before, after in permutations(names, 2):
        for low, high in _changes(live, before, after):
            if before not in best[low] or after not in best[high]:
                continue
            between = {length: live[length] for length in live if low <= length <= high}
            at = _crossing(between, before, after)
            first = _shorter(predicted, low, before, after)
            if held := first and _shorter(predicted, high, after, before):
                others = crossings(
                    {n: times for n, times in predicted.items() if low <= n <= high}, before, after
                )
            else:
                others = crossings(predicted, before, after)
            nearest = min(others, key=lambda x: abs(math.log(x / at)), default=None)
            verdict: Verdict = "predicted" if held else "elsewhere" if others else "not predicted"
            found.append(Inversion(before, after, low, high, at, nearest, verdict))
    return sorted(found, key=lambda each: (each.low, each.high))


def crossings(curves: Curves[Name], before: Name, after: Name) -> list[float]:
    """The lengths from which on `after` takes less time than `before`; noise is not looked at."""
    found = []
    for (a, at_a), (b, at_b) in pairwise(_ratios(curves, before, after)):
        if at_a <= 0 < at_b:
            share = -at_a / (at_b - at_a)
            found.append(math.exp(math.log(a) + share * math.log(b / a)))
    return found


def _ratios(curves: Curves[Name], before: Name, after: Name) -> list[tuple[int, float]]:
    """Length and logarithm of the ratio of the two: above 0 where `after` takes less time."""
    return [
        (length, math.log(times[before].us / times[after].us))
        for length, times in sorted(curves.items())
        if before in times and after in times
    ]


def _crossing(curves: Curves[Name], before: Name, after: Name) -> float:
    """Of several crossings, as noise makes them, the one that the times contradict least."""
    ratios = _ratios(curves, before, after)

    def contradicted(at: float) -> float:
        return sum(max(0.0, ratio if length < at else -ratio) for length, ratio in ratios)

    return min(crossings(curves, before, after), key=contradicted)


def lost(live: Mapping[Name, Time], chosen: Name) -> float:
    """Percent by which `chosen` takes longer than the fastest."""
    return 100 * (live[chosen].us / min(time.us for time in live.values()) - 1)


def fastest(times: Mapping[Name, Time]) -> Name:
    return min(times, key=lambda name: times[name].us)


def _changes(live: Curves[Name], before: Name, after: Name) -> Iterator[tuple[int, int]]:
    """Neighbours among the lengths that tell the two apart, at which they change places."""
    told = [
        (length, times[before].beats(times[after]))
        for length, times in live.items()
        if before in times
        and after in times
        and (times[before].beats(times[after]) or times[after].beats(times[before]))
    ]
    for (low, was_before), (high, is_before) in pairwise(told):
        if was_before and not is_before:
            yield low, high


def _shorter(curves: Curves[Name], length: int, one: Name, other: Name) -> bool:
    return curves[length][one].us < curves[length][other].us
