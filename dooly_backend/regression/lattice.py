"""A smooth function of a few coordinates as a table with even steps, quick to read.

A prediction through a Gaussian process takes a dozen vector operations; one
through its table takes a few multiplications. Between knots it is multilinear;
steps are small against the distance over which the function bends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.scalar import Code, literal

MOST_AXES = 3
_KNOTS = {1: 257, 2: 65, 3: 25}  # at the most, along each axis
_STEPS_PER_LENGTH = 6.0


class Lattice:
    """Values of `function` between `low` and `high`; outside it keeps those at the edge."""

    def __init__(
        self, function: Callable[[Floats], Floats], low: Floats, high: Floats, lengths: Floats
    ) -> None:
        """`function` takes rows of coordinates; `lengths` is over how much of each it bends.

        Axes along which `low` is `high` are left out; no more than three may remain.
        """
        self._axes = [int(i) for i in np.flatnonzero(high > low)]
        if len(self._axes) > MOST_AXES:
            raise ValueError(f"no table over {len(self._axes)} axes")
        shape: list[int] = []
        for i in self._axes:
            wanted = math.ceil((high[i] - low[i]) / lengths[i] * _STEPS_PER_LENGTH) + 1
            shape.append(min(max(wanted, 2), _KNOTS[len(self._axes)]))
        knots = [np.array([value]) for value in low]
        for i, number in zip(self._axes, shape, strict=True):
            knots[i] = np.linspace(low[i], high[i], number)
        places = np.stack([part.ravel() for part in np.meshgrid(*knots, indexing="ij")], axis=1)
        self._values = function(places)
        self._list: list[float] = self._values.tolist()
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        #: of each axis: its column, low end, knots per unit, last cell, stride
        self._grid: list[tuple[int, float, float, int, int]] = [
            (i, float(low[i]), (number - 1) / float(high[i] - low[i]), number - 2, stride)
            for i, number, stride in zip(self._axes, shape, strides, strict=True)
        ]

    def many(self, coordinates: Floats) -> Floats:
        at = np.zeros(len(coordinates), dtype=np.int64)
        shares = []
        for column, low, scale, last, stride in self._grid:
            place = np.clip((coordinates[:, column] - low) * scale, 0.0, last + 1.0)
            cell = np.minimum(place.astype(np.int64), last)
            shares.append((place - cell, stride))
            at += cell * stride
        total = np.zeros(len(coordinates))
        for corner in product((0, 1), repeat=len(shares)):
            weight: Any = 1.0
            offset = 0
            for high, (share, stride) in zip(corner, shares, strict=True):
                weight = weight * (share if high else 1.0 - share)
                offset += stride * high
            total += weight * self._values[at + offset]
        return total

    def write(self, code: Code, coordinates: Sequence[str]) -> str:
        """The same for one place, as lines; `coordinates` are names, as is the result."""
        if not self._grid:
            return literal(self._list[0])
        values = code.bound(self._list)
        at: list[str] = []
        shares: list[str] = []
        for column, low, scale, last, stride in self._grid:
            share, cell = code.name(), code.name()
            place = code.let(f"({coordinates[column]} - {literal(low)}) * {literal(scale)}")
            with code.block(f"if {place} <= 0.0"):
                code.line(f"{share} = 0.0; {cell} = 0")
            with code.block("else"):
                code.line(f"{cell} = trunc({place})")
                with code.block(f"if {cell} > {last}"):
                    code.line(f"{share} = 1.0; {cell} = {last}")
                with code.block("else"):
                    code.line(f"{share} = {place} - {cell}")
            at.append(f"{cell} * {stride}" if stride > 1 else cell)
            shares.append(share)
        first = code.let(" + ".join(at))

        def between(axis: int, offset: int) -> str:
            """Along this axis between the values along the later ones."""
            if axis == len(shares):
                return code.let(f"{values}[{first} + {offset}]" if offset else f"{values}[{first}]")
            low = between(axis + 1, offset)
            high = between(axis + 1, offset + self._grid[axis][4])
            return code.let(f"{low} + {shares[axis]} * ({high} - {low})")

        return between(0, 0)
