"""The range that was measured: outside it a prediction says that it extrapolates.

Inside it a batch may still be composed as no measured one is: several prefills,
prefills beside decodes, uneven decodes. What is known of each part is put
together then, which is less sure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dooly_backend.errors import InputError
from dooly_backend.regression.batches import Floats
from dooly_backend.regression.models import Training
from dooly_backend.regression.scalar import Code, literal
from dooly_backend.workload import PointKind

#: By kind: the parts of a batch, the feature that tells whether it has one (None: always),
#: and the features that must lie in the measured range then.
_PARTS: dict[PointKind, tuple[tuple[str, str | None, tuple[str, ...]], ...]] = {
    "constant": (),
    "tokens": (("tokens", None, ("num_tokens",)),),
    "requests": (("requests", None, ("num_reqs",)),),
    "routing": (("tokens", None, ("num_tokens", "experts")),),
    "batch": (
        (
            "prefills",
            "prefills",
            ("prefill_tokens", "prefill_chunk_size", "prefill_history", "prefill_pairs"),
        ),
        (
            "decodes",
            "decodes",
            ("decodes", "decode_context", "decode_longest", "decode_keys"),
        ),
    ),
}


#: Compositions of a batch: features, all of which are above these values.
_COMPOSITIONS: dict[str, tuple[tuple[str, float], ...]] = {
    "several prefills": (("prefills", 1.0),),
    "uneven decodes": (("decode_unevenness", 1.0),),
    "mixed": (("prefills", 0.0), ("decodes", 0.0)),
}
_COMPOSED = "compositions"  # the key of `bounds` that tells which of them were measured


class Domain:
    """Bounds of features, of every part of a batch that was measured."""

    def __init__(self, kind: PointKind, bounds: Mapping[str, Any], features: Sequence[str]) -> None:
        """`bounds` as `domain_of` makes them; KeyError, TypeError or ValueError for others."""
        self.bounds = bounds
        self._missing: list[tuple[str, int]] = []
        self._boxes: list[tuple[int | None, list[tuple[int, float, float]]]] = []
        for part, present, names in _PARTS[kind]:
            column = None if present is None else features.index(present)
            if bounds[part] is None:
                assert column is not None
                self._missing.append((part, column))
                continue
            limits = [
                (features.index(name), float(bounds[part][name][0]), float(bounds[part][name][1]))
                for name in names
            ]
            self._boxes.append((column, limits))
        measured = bounds[_COMPOSED]
        self._unmeasured = [
            [(features.index(name), above) for name, above in tests]
            for composition, tests in (_COMPOSITIONS.items() if kind == "batch" else ())
            if composition not in measured
        ]

    def unfamiliar(self, rows: Floats) -> NDArray[np.bool_]:
        """Of each row, whether it is composed as no measured batch is."""
        result = np.zeros(len(rows), dtype=bool)
        for tests in self._unmeasured:
            composed = np.ones(len(rows), dtype=bool)
            for at, above in tests:
                composed &= rows[:, at] > above
            result |= composed
        return result

    def write_unfamiliar(self, code: Code) -> str:
        """The same of one row, as lines; the name of the result, or ``False``."""
        composed = [
            " and ".join(f"{code.feature(at)} > {literal(above)}" for at, above in tests)
            for tests in self._unmeasured
        ]
        return code.let(" or ".join(composed)) if composed else "False"

    def outside(self, rows: Floats) -> NDArray[np.bool_]:
        """Of each row, whether it extrapolates. Raises InputError for a part never measured."""
        for part, column in self._missing:
            if (rows[:, column] > 0).any():
                raise _unmeasured(part)
        result = np.zeros(len(rows), dtype=bool)
        for part_of, limits in self._boxes:
            outside = np.zeros(len(rows), dtype=bool)
            for at, low, high in limits:
                outside |= (rows[:, at] < low) | (rows[:, at] > high)
            result |= outside if part_of is None else outside & (rows[:, part_of] > 0)
        return result

    def write_outside(self, code: Code) -> str:
        """The same of one row, as lines; the name of the result."""
        for part, column in self._missing:
            error = code.bound(partial(_unmeasured, part))
            with code.block(f"if {code.feature(column)} > 0.0"):
                code.line(f"raise {error}()")
        beyond = []
        for present, limits in self._boxes:
            inside = " and ".join(
                f"{literal(low)} <= {code.feature(at)} <= {literal(high)}"
                for at, low, high in limits
            )
            there = f"{code.feature(present)} > 0.0 and " if present is not None else ""
            beyond.append(f"{there}not ({inside})")
        return code.let(" or ".join(beyond) if beyond else "False")


def domain_of(data: Training) -> dict[str, Any]:
    """The bounds of measured points, as plain data; None for a part that no point has."""
    bounds: dict[str, Any] = {}
    for part, present, names in _PARTS[data.kind]:
        some = data.column(present) > 0 if present is not None else np.ones(len(data), dtype=bool)
        bounds[part] = None
        if some.any():
            columns = {name: data.column(name)[some] for name in names}
            bounds[part] = {name: [float(c.min()), float(c.max())] for name, c in columns.items()}
    bounds[_COMPOSED] = [
        composition
        for composition, tests in (_COMPOSITIONS.items() if data.kind == "batch" else ())
        if np.all([data.column(name) > above for name, above in tests], axis=0).any()
    ]
    return bounds


def _unmeasured(part: str) -> InputError:
    return InputError(
        f"there are no measured {part} to predict from: run `dooly profile` again, "
        "it continues where it stopped"
    )
