"""Piecewise linear times along one axis (`Curve`) and over two (`Surface`).

Below the first measured point a time is that point's; above the last one it
continues the line through the last two, but never falls. Both are marked as
extrapolated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple


class Statistics(NamedTuple):
    """What is known of a time, in microseconds."""

    min_us: float
    mean_us: float
    median_us: float
    max_us: float
    std_us: float


class Estimate(NamedTuple):
    """Statistics at a place, and whether that lies outside the measured range."""

    statistics: Statistics
    extrapolated: bool


class Curve:
    """Statistics along one axis, exact at the measured points.

    `end_slope` (per unit of the axis) is for a curve of one point, which has
    no slope of its own.
    """

    def __init__(
        self, points: Mapping[float, Statistics], end_slope: Statistics | None = None
    ) -> None:
        """`points` must not be empty."""
        ordered = sorted(points.items())
        self._places = [place for place, _ in ordered]
        self._values = [values for _, values in ordered]
        if len(ordered) > 1:
            end_slope = slope(*ordered[-2], *ordered[-1])
        self.end_slope = end_slope

    @property
    def size(self) -> int:
        return len(self._places)

    def at(self, place: float) -> Estimate:
        index = bisect_left(self._places, place)
        if index == len(self._places):
            values = beyond(self._values[-1], self.end_slope, place - self._places[-1])
            return Estimate(values, extrapolated=True)
        if self._places[index] == place:
            return Estimate(self._values[index], extrapolated=False)
        if index == 0:
            return Estimate(self._values[0], extrapolated=True)
        low, high = self._places[index - 1], self._places[index]
        share = (place - low) / (high - low)
        return Estimate(between(self._values[index - 1], self._values[index], share), False)


class Surface:
    """Statistics over (size, context), from a grid that may have holes.

    Each measured size has a curve along the context; sizes are joined by
    straight lines. A size measured at one context only (the corner where
    another chunk would not fit the longest sequence) takes its slope from the
    nearest size that has one, in proportion to the sizes: attention's work is
    new tokens times context.
    """

    def __init__(self, points: Mapping[tuple[float, float], Statistics]) -> None:
        """`points` by (size, context) must not be empty."""
        grid: dict[float, dict[float, Statistics]] = {}
        for (size, context), values in points.items():
            grid.setdefault(size, {})[context] = values
        self._sizes = sorted(grid)
        self._curves = _with_slopes([(size, Curve(grid[size])) for size in self._sizes], grid)

    def at(self, size: float, context: float) -> Estimate:
        index = bisect_left(self._sizes, size)
        if index < len(self._sizes) and self._sizes[index] == size:
            return self._curves[index].at(context)
        if index == 0:
            return Estimate(self._curves[0].at(context).statistics, extrapolated=True)
        if index == len(self._sizes):
            return self._above(size, context)
        low, high = self._sizes[index - 1], self._sizes[index]
        lower, upper = self._curves[index - 1].at(context), self._curves[index].at(context)
        values = between(lower.statistics, upper.statistics, (size - low) / (high - low))
        return Estimate(values, lower.extrapolated or upper.extrapolated)

    def _above(self, size: float, context: float) -> Estimate:
        last = self._curves[-1].at(context).statistics
        rise = None
        if len(self._sizes) > 1:
            before = self._curves[-2].at(context).statistics
            rise = slope(self._sizes[-2], before, self._sizes[-1], last)
        return Estimate(beyond(last, rise, size - self._sizes[-1]), extrapolated=True)


def between(low: Statistics, high: Statistics, share: float) -> Statistics:
    """The point `share` (0 to 1) of the way from `low` to `high`."""
    values = []
    for a, b in zip(low, high, strict=True):
        value = a + share * (b - a)
        # Rounding must not carry it past b.
        past = value > b if b > a else value < b
        values.append(b if past else value)
    return Statistics._make(values)


def slope(low_place: float, low: Statistics, high_place: float, high: Statistics) -> Statistics:
    """The rise per unit of the axis; where noise makes it fall, none."""
    width = high_place - low_place
    return Statistics(*[max(0.0, (b - a) / width) for a, b in zip(low, high, strict=True)])


def beyond(last: Statistics, rise: Statistics | None, distance: float) -> Statistics:
    """`last`, continued along `rise`; the order min <= median <= max is kept."""
    if rise is None:
        return last
    smallest, mean, median, largest, std = (
        value + per_unit * distance for value, per_unit in zip(last, rise, strict=True)
    )
    smallest, largest = min(smallest, median), max(largest, median)
    return Statistics(smallest, min(max(mean, smallest), largest), median, largest, std)


def _with_slopes(
    curves: list[tuple[float, Curve]], grid: Mapping[float, Mapping[float, Statistics]]
) -> list[Curve]:
    """Curves of one point given the slope of the nearest size, scaled to theirs."""
    sloped = [(size, curve.end_slope) for size, curve in curves if curve.end_slope is not None]
    if not sloped:
        return [curve for _, curve in curves]
    result = []
    for size, curve in curves:
        if curve.end_slope is None:
            near, rise = min(sloped, key=lambda item: abs(item[0] - size))
            scaled = Statistics(*[per_unit * size / near for per_unit in rise])
            curve = Curve(grid[size], end_slope=scaled)
        result.append(curve)
    return result
