"""How a batch is composed: what its time, and how well it is predicted, depend on.

A measured batch is of one composition. Errors of batches composed alike are of a
size; those of others may be several times as large (intervals.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.scalar import Code
from dooly_backend.workload import PointKind

#: In the order of their codes.
COMPOSITIONS = ("prefill", "prefills", "decodes", "uneven decodes", "mixed")
_FEATURES = ("prefills", "decodes", "decode_unevenness")


class Composer:
    """The code of each row's composition; 0 for signatures whose rows are no batches."""

    def __init__(self, kind: PointKind, features: Sequence[str]) -> None:
        """Raises ValueError where the features of batches are missing."""
        self._columns = [features.index(name) for name in _FEATURES] if kind == "batch" else None

    def many(self, rows: Floats) -> NDArray[np.int64]:
        if self._columns is None:
            return np.zeros(len(rows), dtype=np.int64)
        prefills, decodes, unevenness = (rows[:, column] for column in self._columns)
        several, uneven = prefills > 1, unevenness > 1
        return np.where(prefills > 0, np.where(decodes > 0, 4, several), 2 + uneven)

    def write(self, code: Code) -> str:
        """The same of one row, as lines; the name of the result."""
        if self._columns is None:
            return "0"
        prefills, decodes, unevenness = map(code.feature, self._columns)
        composition = code.name()
        with code.block(f"if {prefills} > 0.0"):
            alone = f"(1 if {prefills} > 1.0 else 0)"
            code.line(f"{composition} = 4 if {decodes} > 0.0 else {alone}")
        with code.block("else"):
            code.line(f"{composition} = 3 if {unevenness} > 1.0 else 2")
        return composition
