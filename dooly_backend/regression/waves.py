"""Thread blocks run in waves: work that a device's processors cannot share out evenly.

A kernel of attention gives a thread block `ROWS` rows of one key-value head, and a device
runs so many blocks at once, its *width*. 16 decodes with 8 such heads are 128 blocks and
one wave on an H200 (132 processors), 17 are two: they take it 1.4 times as long. Kernels
that cut a request's keys into pieces, or hold several blocks on a processor, have another
width, or none. So it is found by what was measured, not taken from the device.

FlashAttention 3 divides the keys of few requests so that the blocks fill the last wave, and
from 0.8 waves on no more (`num_splits_heuristic` of its `hopper/heuristics.h`): 8 requests
with 8 such heads are faster than 6, and 14 to 16 take the same. Whether a kernel does is found
likewise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dooly_backend.regression.batches import Floats, Integers
from dooly_backend.regression.models import Parameters
from dooly_backend.regression.scalar import Code, literal

#: Widths that are tried: from 64 processors to 160 that hold four blocks each.
WIDTHS = (*range(64, 324, 4), *range(328, 648, 8))
_GAIN = 0.97  # of the squared error without waves; they are worth their parameters below that
_SMALL = 0.005  # a mean relative error that nothing needs to explain
_EQUAL = 1e-3  # of the squared error without waves
_FEWEST = 20  # points
_MOST_TO_TRY = 160  # points that widths are compared on


#: Keys of a piece, pieces of a request, and shares of a wave: FlashAttention 3's rule.
_PIECE, _PIECES = 128, 32
_FEW_PIECES = 4  # that are not dealt out
_FULL, _NEARLY = 0.8, 0.85


@dataclass(frozen=True)
class Shape:
    """The features that tell a phase's waves: its blocks, and ``work / per`` of each of them.

    `divides`: whether a kernel may divide that work among several blocks.
    """

    blocks: str
    work: str
    per: str
    divides: bool = False


class Waves:
    """Microseconds: ``number of waves * (each + of_work * work / per)``.

    Where the work is `divided`, there are more blocks with a part of it each.
    """

    def __init__(self, parameters: Parameters, features: Sequence[str]) -> None:
        """Raises KeyError, TypeError or ValueError for parameters of another shape."""
        names = parameters["blocks"], parameters["work"], parameters["per"]
        self._blocks, self._work, self._per = (features.index(name) for name in names)
        self._width = float(parameters["width"])
        self._each, self._of_work = float(parameters["each"]), float(parameters["of_work"])
        if self._width <= 0 or self._each < 0 or self._of_work < 0:
            raise ValueError("waves need a width and times that are not negative")
        self._pieces = pieces(self._width) if parameters["divided"] else None

    def many(self, rows: Floats) -> Floats:
        number, of_work = _columns(
            rows[:, self._blocks],
            rows[:, self._work],
            rows[:, self._per],
            self._width,
            self._pieces,
        )
        return self._each * number + self._of_work * of_work

    def write(self, code: Code) -> str:
        """The same of one row, as lines; the name of the result."""
        per = code.feature(self._per)
        blocks = code.let(code.feature(self._blocks))
        work = code.let(f"{code.feature(self._work)} / ({per} if {per} > 1.0 else 1.0)")
        if self._pieces is not None:
            table = code.bound(self._pieces.tolist())
            with code.block(f"if {blocks} < {len(self._pieces)}"):
                most = code.let(f"trunc(-(-{work} // {_PIECE}))")
                parts = code.let(
                    f"{table}[trunc({blocks})][{most} if {most} < {_PIECES} else {_PIECES}]"
                )
                code.line(f"{blocks} *= {parts}")
                code.line(f"{work} /= {parts}")
        number = f"-(-{blocks} // {literal(self._width)})"
        each = f"{literal(self._each)} + {literal(self._of_work)} * {work}"
        return code.let(f"{number} * ({each})")


def columns(
    blocks: Floats, work: Floats, per: Floats, width: float, divided: bool = False
) -> tuple[Floats, Floats]:
    """What `Waves` multiplies with its two times, of each point."""
    return _columns(blocks, work, per, width, pieces(width) if divided else None)


def _columns(
    blocks: Floats, work: Floats, per: Floats, width: float, table: Integers | None
) -> tuple[Floats, Floats]:
    each = work / np.maximum(per, 1.0)
    if table is not None:
        # Beyond the table a wave is full enough without: one piece, as in its last row.
        place = np.minimum(blocks, len(table) - 1).astype(np.int64)
        most = np.minimum(np.ceil(each / _PIECE), _PIECES).astype(np.int64)
        parts = np.where(blocks < len(table), table[place, most], 1)
        blocks, each = blocks * parts, each / parts
    number = np.ceil(blocks / width)
    return number, number * each


@functools.cache
def pieces(width: float) -> Integers:
    """Into how many pieces the work of so many blocks is divided, by the pieces that it has.

    So few that the last wave is nearly as full as with any number: from 0 blocks to those
    that nearly fill one wave, from 0 pieces to 32.
    """
    blocks = np.arange(math.ceil(_FULL * width))
    parts = np.arange(1, _PIECES + 1)
    waves = blocks[:, None] * parts / width
    fullness = waves / np.maximum(np.ceil(waves), 1.0)
    table = np.ones((len(blocks), _PIECES + 1), dtype=np.int64)
    for most in range(_FEW_PIECES + 1, _PIECES + 1):
        possible = fullness[:, :most]
        enough = possible >= _NEARLY * possible.max(axis=1, keepdims=True)
        table[:, most] = parts[enough.argmax(axis=1)]
    return table


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
