"""Thread blocks run in waves: work that a device's processors cannot share out evenly.

A kernel of attention gives a thread block `ROWS` rows of one key-value head, and a device
runs so many blocks at once, its *width*. 16 decodes with 8 such heads are 128 blocks and
one wave on an H200 (132 processors), 17 are two: they take it 1.4 times as long. Kernels
that cut a request's keys into pieces, or hold several blocks on a processor, have another
width, or none. So it is found by what was measured, not taken from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.models import Parameters

#: Widths that are tried: from 64 processors to 160 that hold four blocks each.
WIDTHS = (*range(64, 324, 4), *range(328, 648, 8))
_GAIN = 0.97  # of the squared error without waves; they are worth their parameters below that
_SMALL = 0.005  # a mean relative error that nothing needs to explain
_EQUAL = 1e-3  # of the squared error without waves
_FEWEST = 20  # points
_MOST_TO_TRY = 160  # points that widths are compared on


@dataclass(frozen=True)
class Shape:
    """The features that tell a phase's waves: its blocks, and ``work / per`` of each of them."""

    blocks: str
    work: str
    per: str


class Waves:
    """Microseconds: ``number of waves * (each + of_work * work / per)``."""

    def __init__(self, parameters: Parameters, features: Sequence[str]) -> None:
        """Raises KeyError, TypeError or ValueError for parameters of another shape."""
        names = parameters["blocks"], parameters["work"], parameters["per"]
        self._blocks, self._work, self._per = (features.index(name) for name in names)
        self._width = float(parameters["width"])
        self._each, self._of_work = float(parameters["each"]), float(parameters["of_work"])
        if self._width <= 0 or self._each < 0 or self._of_work < 0:
            raise ValueError("waves need a width and times that are not negative")

    def many(self, rows: Floats) -> Floats:
        number = np.ceil(rows[:, self._blocks] / self._width)
        work = rows[:, self._work] / np.maximum(rows[:, self._per], 1.0)
        return number * (self._each + self._of_work * work)

    def one(self, row: Sequence[float]) -> float:
        number = -(-row[self._blocks] // self._width)
        return number * (self._each + self._of_work * row[self._work] / max(row[self._per], 1.0))


def columns(blocks: Floats, work: Floats, per: Floats, width: float) -> tuple[Floats, Floats]:
    """What `Waves` multiplies with its two times, of each point."""
    number = np.ceil(blocks / width)
    return number, number * work / np.maximum(per, 1.0)


def best_width(
    blocks: Floats,
    squared_error: Callable[[float | None, Any], float],
    widths: Sequence[int] = WIDTHS,
) -> float | None:
    """The width with which a trend errs least; None where waves explain little.

    `squared_error` of a width, or of None for no waves, over the points that an index
    array chooses.
    """
    if len(blocks) < _FEWEST or np.unique(blocks).size < _FEWEST // 2:
        return None
    whole = np.arange(len(blocks))
    without = squared_error(None, whole)
    if without < len(blocks) * _SMALL**2:
        return None
    few = np.linspace(0, len(blocks) - 1, min(len(blocks), _MOST_TO_TRY)).astype(int)
    errors = {width: squared_error(float(width), few) for width in widths if width < blocks.max()}
    if not errors:
        return None
    least = min(errors.values())
    # Points that lie apart do not tell neighbouring widths apart: the middle one of the best.
    best = [width for width, error in errors.items() if error <= least + _EQUAL * without]
    width = float(best[len(best) // 2])
    return width if squared_error(width, whole) < _GAIN * without else None
