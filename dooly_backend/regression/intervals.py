"""How sure a prediction is: intervals that hold nine of ten measurements.

Split conformal prediction on the errors at held-out points (cross-validation). An
error is ``|log(measured / predicted)|``; its score is what it is divided by how
large errors are there:

- of batches composed alike (compositions.py): mixed ones err by several times as
  much as equal decodes;
- and near its place, the first feature (tokens, requests) or the predicted time
  where there are many features: a short call scatters more than a long one.

The half-width is that scale times the scores' 90% quantile, with the correction
for a finite number of them. Few errors tell neither well, so both are drawn to
what signatures of the same kind show: the scale as if `_PRIOR` errors were added,
the quantile by counting their scores as much as `_ALIKE` of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.compositions import COMPOSITIONS
from dooly_backend.regression.models import Parameters, floats
from dooly_backend.regression.scalar import Code, literal

LEVEL = 0.9
_KNOTS = 24
_OUTSIDE = 2.0  # at the least, how much wider an interval is outside the measured range
_UNFAMILIAR = 1.5  # how much wider for a batch composed as none was measured
_PRIOR = 4.0  # errors that what is known of more of them counts as
_ALIKE = 50.0  # scores that those of all other signatures of the kind count as
_NEAR = 5  # errors beside a point that tell its scale, at the least
_SHARE = 6  # of those of a signature, one in so many is near
#: The mean of errors is that of their roots, squared: one kernel that switches between
#: two points must not make the interval of all others wide.
_ROOT = 0.5
_WHOLE = -1  # the code of all compositions together


@dataclass(frozen=True)
class HeldOut:
    """Errors of one signature's chosen model at held-out points.

    `places` are what errors are alike along (`places_of`); `outside` tells which
    points lay outside the range of what the model had seen; `compositions` are codes.
    """

    places: Floats
    errors: Floats  # |log(measured / predicted)|
    outside: Any
    compositions: Any

    @property
    def inside(self) -> HeldOut:
        return self.only(~self.outside)

    def only(self, kept: Any) -> HeldOut:
        return HeldOut(
            self.places[kept], self.errors[kept], self.outside[kept], self.compositions[kept]
        )

    def of(self, composition: int) -> HeldOut:
        return self if composition == _WHOLE else self.only(self.compositions == composition)

    def __len__(self) -> int:
        return len(self.errors)


def nothing_held_out() -> HeldOut:
    nothing = np.empty(0)
    return HeldOut(nothing, nothing, np.empty(0, dtype=bool), np.empty(0, dtype=np.int64))


class _Table:
    """Half-widths along places, straight between them."""

    def __init__(self, parameters: Parameters) -> None:
        self.places, self.half = floats(parameters["places"], 1), floats(parameters["half"], 1)
        if self.places.shape != self.half.shape or not len(self.places):
            raise ValueError("an interval needs a half-width for each of its places")
        if (np.diff(self.places) <= 0).any() or (self.half < 0).any():
            raise ValueError("an interval needs rising places, and no half-width below 0")
        self.lists = self.places.tolist(), self.half.tolist()

    def many(self, places: Floats) -> Floats:
        return np.interp(places, self.places, self.half)


class Interval:
    """The half-width in logarithms of a prediction's interval, by its place and composition."""

    def __init__(self, parameters: Parameters) -> None:
        """Raises KeyError, TypeError or ValueError for parameters of another shape.

        A bundle of before compositions had tables has one for all of them.
        """
        self._outside = float(parameters["outside"])
        whole = _Table(parameters)
        tables = parameters.get("compositions", {})
        unknown = set(tables) - set(COMPOSITIONS)
        if unknown:
            raise ValueError(f"there is no composition {min(unknown)!r}")
        self._own = [
            (code, _Table(tables[n])) for code, n in enumerate(COMPOSITIONS) if n in tables
        ]
        self._tables = [dict(self._own).get(code, whole) for code in range(len(COMPOSITIONS))]
        self._whole = whole

    def many(
        self, places: Floats, outside: Any, unfamiliar: Any = False, compositions: Any = None
    ) -> Floats:
        """Of each place; `compositions` are codes, which kinds without any need not give."""
        half = self._whole.many(places)
        if compositions is not None:
            for code, table in self._own:
                some = compositions == code
                if some.any():
                    half[some] = table.many(places[some])
        half = np.where(unfamiliar, half * _UNFAMILIAR, half)
        return np.where(outside, np.maximum(half * _OUTSIDE, self._outside), half)

    def write(self, code: Code, place: str, outside: str, unfamiliar: str, composition: str) -> str:
        """The same of one place, as lines; arguments are names, as is the result."""
        tables = code.bound([table.lists for table in self._tables])
        places, values, index, half = (code.name() for _ in range(4))
        code.line(f"{places}, {values} = {tables}[{composition}]")
        code.line(f"{index} = {code.bound(bisect_left)}({places}, {place})")
        with code.block(f"if {index} == 0"):
            code.line(f"{half} = {values}[0]")
        with code.block(f"elif {index} == len({places})"):
            code.line(f"{half} = {values}[-1]")
        with code.block("else"):
            low, high = code.let(f"{places}[{index} - 1]"), f"{places}[{index}]"
            start, end = code.let(f"{values}[{index} - 1]"), f"{values}[{index}]"
            share = f"({place} - {low}) / ({high} - {low})"
            code.line(f"{half} = {start} + {share} * ({end} - {start})")
        if unfamiliar != "False":
            with code.block(f"if {unfamiliar}"):
                code.line(f"{half} *= {_UNFAMILIAR}")
        with code.block(f"if {outside}"):
            code.line(f"{half} = max({half} * {_OUTSIDE}, {literal(self._outside)})")
        return half


def places_of(rows: Floats, us: Floats) -> Floats:
    """Along what errors are alike: the first feature where there are few, else the time."""
    return rows[:, 0] if is_along_feature(rows.shape[1]) else us


def is_along_feature(features: int) -> bool:
    """Whether intervals of a signature with so many features go along the first one."""
    return 0 < features <= 2


# -- fitting --------------------------------------------------------------------


class Intervals:
    """The intervals of signatures of one kind, which learn from each other."""

    def __init__(self, held_out: Sequence[HeldOut]) -> None:
        self._inside = [each.inside for each in held_out]
        self._held_out = list(held_out)
        self._pooled = _pool(self._inside)
        self._typical: dict[int, float] = {}
        # By composition: the scores of all signatures, and whose they are.
        self._scores: dict[int, tuple[Floats, Any]] = {}
        for code in (_WHOLE, *np.unique(self._pooled.compositions).tolist()):
            self._typical[code] = self._typical_of(code)
            each = [_scores(one.of(code), self._typical[code]) for one in self._inside]
            owners = np.repeat(np.arange(len(each)), [len(scores) for scores in each])
            self._scores[code] = np.concatenate([np.empty(0), *each]), owners

    def _typical_of(self, composition: int) -> float:
        """The mean root of an error; of a composition with few, drawn to that of all."""
        roots = self._pooled.of(composition).errors ** _ROOT
        if composition == _WHOLE:
            return float(roots.mean()) if len(roots) else 0.0
        return float((roots.sum() + _PRIOR * self._typical[_WHOLE]) / (len(roots) + _PRIOR))

    def fit(self, index: int, noise: float) -> dict[str, Any]:
        """The parameters of a signature's `Interval`.

        `noise` is its relative spread between samples, for where there are no errors at all.
        """
        own, beyond = self._inside[index], self._held_out[index]
        table = self._table(index, own, _WHOLE)
        if not len(own):
            table["half"] = [max(table["half"][0], conformal_noise(noise))]
        codes = np.unique(own.compositions).tolist()
        errors = beyond.errors[beyond.outside]
        outside = conformal_quantile(errors) if len(errors) >= 2 else 0.0
        tables = {COMPOSITIONS[code]: self._table(index, own.of(code), code) for code in codes}
        return {**table, "outside": outside, "compositions": tables if len(codes) > 1 else {}}

    def _table(self, index: int, own: HeldOut, composition: int) -> dict[str, Any]:
        scores, owners = self._scores[composition]
        others = int((owners != index).sum())
        weights = np.where(owners == index, 1.0, min(1.0, _ALIKE / max(others, 1)))
        quantile = conformal_quantile(scores, weights)
        typical = self._typical[composition]
        if not len(own):
            return {"places": [1.0], "half": [quantile * typical ** (1 / _ROOT)]}
        scale = _scale(own, typical, leave_out=False)
        places, first = np.unique(own.places, return_index=True)
        kept = np.unique(np.linspace(0, len(places) - 1, min(_KNOTS, len(places))).astype(int))
        return {"places": places[kept].tolist(), "half": (quantile * scale[first][kept]).tolist()}


def conformal_noise(noise: float) -> float:
    """The half-width where only the spread between samples is known."""
    return 1.645 * noise


def conformal_quantile(
    scores: Floats, weights: Floats | None = None, level: float = LEVEL
) -> float:
    """The smallest score that the next one stays below with probability `level`.

    The next one counts as much as a score of weight 1. With too few scores for
    that, the largest.
    """
    if not len(scores):
        return 0.0
    weights = np.ones(len(scores)) if weights is None else weights
    order = np.argsort(scores)
    below = np.cumsum(weights[order])
    rank = int(np.searchsorted(below, level * (below[-1] + 1.0) - 1e-9))
    return float(scores[order][min(rank, len(scores) - 1)])


def _pool(held_out: Sequence[HeldOut]) -> HeldOut:
    every = [nothing_held_out(), *held_out]
    return HeldOut(
        np.concatenate([each.places for each in every]),
        np.concatenate([each.errors for each in every]),
        np.concatenate([each.outside for each in every]),
        np.concatenate([each.compositions for each in every]),
    )


def _scores(held_out: HeldOut, typical: float) -> Floats:
    """Errors per local scale; a point's own error does not count in its scale."""
    return held_out.errors / _scale(held_out, typical, leave_out=True)


def _scale(held_out: HeldOut, typical: float, leave_out: bool) -> Floats:
    """Of each point, the mean error of those near its place.

    It is drawn to the mean of all, and that to what is typical (a mean of roots).
    """
    number = len(held_out)
    if not number:
        return np.empty(0)
    near = min(number - 1, max(_NEAR, number // _SHARE))
    order = np.argsort(held_out.places, kind="stable")
    roots = held_out.errors[order] ** _ROOT
    # The window may be cut at the ends: then it lies to one side.
    start = np.clip(np.arange(number) - near // 2, 0, number - near - 1)
    sums = np.append(0.0, np.cumsum(roots))
    own = roots if leave_out else 0.0
    one = 1 if leave_out else 0
    whole = (sums[-1] - own + _PRIOR * typical) / (number - one + _PRIOR)
    window = sums[start + near + 1] - sums[start] - own
    scale = np.empty(number)
    scale[order] = ((window + _PRIOR * whole) / (near + 1 - one + _PRIOR)) ** (1 / _ROOT)
    return np.maximum(scale, 1e-6)
