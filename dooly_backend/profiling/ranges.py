"""Ranges of whole numbers: where to start in them, where to go on, and what a gap counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

#: From one first point to the next.
FACTOR = 8
#: A point so near to where one is wanted stands for it.
NEAR = 1.5


def _odd(number: int) -> int:
    """`number` or the one above it, which is no multiple of a kernel's tile; small ones stay.

    Steps have any number of tokens, and kernels are quickest at multiples of
    their tiles: from points at nothing but multiples, what lies between them is
    predicted up to a fifth too quick.
    """
    return number | 1 if number > 2 * FACTOR else number


def _distance(rung: int) -> Callable[[int], float]:
    return lambda value: abs(math.log(value / rung))


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`. `unit` is what 0 is distinguished from, where it is 0."""

    low: int
    high: int
    unit: int = 256

    def rungs(self, factor: int = FACTOR) -> list[int]:
        """Both ends, and between them one number every `factor`; few near the upper end."""
        if self.high <= self.low:
            return [self.low]
        inner = []
        value = self.low * factor or self.unit
        while value * math.sqrt(factor) < self.high:
            inner.append(_odd(value))
            value *= factor
        return [self.low, *inner, self.high]

    def between(self, low: int, high: int) -> int | None:
        """A number halfway from `low` to `high` by their ratio, None where they are neighbours."""
        middle = _odd(math.isqrt(low * high) if low else high // 4)
        nearest = 1 if high <= 32 else 8 if high <= 512 else 16
        return middle if low < middle < high and high - low > nearest else None

    def share(self, low: int, high: int) -> float:
        """How much of the use lies between two numbers: 0 to 1.

        Half of it is spread evenly over the ratios (a step has 8 tokens or 16),
        half over the numbers themselves.
        """
        low, high = max(low, self.low), min(high, self.high)
        if high <= low:
            return 0.0
        shift = 0 if self.low else self.unit
        ratio = math.log((high + shift) / (low + shift))
        whole = math.log((self.high + shift) / (self.low + shift))
        return (ratio / whole + (high - low) / (self.high - self.low)) / 2

    def standing(self, values: list[int]) -> dict[int, int | None]:
        """For every rung, the one of `values` that stands for it, None where none does.

        Between the ends a near one will do; for an end, one at or beyond it.
        """
        found: dict[int, int | None] = {}
        for rung in self.rungs():
            if rung == self.low:
                found[rung] = max((v for v in values if v <= rung), default=None)
            elif rung == self.high:
                found[rung] = min((v for v in values if v >= rung), default=None)
            else:
                near = [v for v in values if rung / NEAR <= v <= rung * NEAR]
                found[rung] = min(near, key=_distance(rung), default=None)
        return found

    def uncovered(self, values: list[int]) -> list[int]:
        """The rungs that none of `values` stands for."""
        return [rung for rung, value in self.standing(values).items() if value is None]
