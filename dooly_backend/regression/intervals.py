"""How sure a prediction is: intervals that hold nine of ten measurements.

Split conformal prediction on the errors at held-out points (cross-validation):
an error is ``|log(measured / predicted)|``, divided by how large the errors of
points with times like it are, since a short call scatters more than a long one.
The 90% quantile of these scores, with the correction for a finite number of
them, times the local scale, is the half-width. It is a table over the first
feature (tokens, requests), or over the predicted time where there are many
features. Signatures with few points borrow the quantile of all of their kind.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.models import Parameters, floats

LEVEL = 0.9
_FEWEST = 15  # scores whose own 90% quantile says something
_KNOTS = 24
_OUTSIDE = 2.0  # at the least, how much wider an interval is outside the measured range
_UNFAMILIAR = 1.5  # how much wider for a batch composed as none was measured


@dataclass(frozen=True)
class HeldOut:
    """Errors of one signature's chosen model at held-out points.

    `places` are what errors are alike along (`places_of`); `outside` tells
    which points lay outside the range of what the model had seen.
    """

    places: Floats
    errors: Floats  # |log(measured / predicted)|
    outside: Any

    @property
    def inside(self) -> HeldOut:
        kept = ~self.outside
        return HeldOut(self.places[kept], self.errors[kept], self.outside[kept])

    def __len__(self) -> int:
        return len(self.errors)


class Interval:
    """The half-width in logarithms of a prediction's interval, by its place."""

    def __init__(self, parameters: Parameters) -> None:
        """Raises KeyError, TypeError or ValueError for parameters of another shape."""
        self._places, self._half = floats(parameters["places"], 1), floats(parameters["half"], 1)
        if self._places.shape != self._half.shape or (np.diff(self._places) <= 0).any():
            raise ValueError("an interval needs rising places, and a half-width for each")
        self._outside = float(parameters["outside"])
        self._lists = self._places.tolist(), self._half.tolist()

    def many(self, places: Floats, outside: Any, unfamiliar: Any = False) -> Floats:
        half = np.interp(places, self._places, self._half)
        half = np.where(unfamiliar, half * _UNFAMILIAR, half)
        return np.where(outside, np.maximum(half * _OUTSIDE, self._outside), half)

    def one(self, place: float, outside: bool, unfamiliar: bool = False) -> float:
        places, values = self._lists
        index = bisect_left(places, place)
        if index == 0 or index == len(places):
            half = values[min(index, len(places) - 1)]
        else:
            share = (place - places[index - 1]) / (places[index] - places[index - 1])
            half = values[index - 1] + share * (values[index] - values[index - 1])
        if unfamiliar:
            half *= _UNFAMILIAR
        return max(half * _OUTSIDE, self._outside) if outside else half


def places_of(rows: Floats, us: Floats) -> Floats:
    """Along what errors are alike: the first feature where there are few, else the time."""
    return rows[:, 0] if is_along_feature(rows.shape[1]) else us


def is_along_feature(features: int) -> bool:
    """Whether intervals of a signature with so many features go along the first one."""
    return 0 < features <= 2


def pooled_scores(held_out: Sequence[HeldOut]) -> Floats:
    """Scores of several signatures together."""
    scores = [_scores(each.inside) for each in held_out if len(each.inside)]
    return np.concatenate(scores) if scores else np.empty(0)


def pooled_errors(held_out: Sequence[HeldOut]) -> Floats:
    errors = [each.inside.errors for each in held_out]
    return np.concatenate(errors) if errors else np.empty(0)


def fit_interval(held_out: HeldOut, scores: Floats, errors: Floats, noise: float) -> dict[str, Any]:
    """A table of half-widths.

    `scores` and `errors` are those of all signatures of the kind, for a
    signature that has few; `noise` is its relative spread between samples, for
    where there are none at all.
    """
    inside = held_out.inside
    own = _scores(inside)
    quantile = conformal_quantile(own if len(own) >= _FEWEST else scores)
    if len(inside) < 2:
        typical = float(errors.mean()) if len(errors) else 0.0
        half = max(quantile * typical, conformal_noise(noise))
        table = [1.0], [half]
    else:
        scale = _scale(inside, leave_out=False)
        places, first = np.unique(inside.places, return_index=True)
        kept = np.unique(np.linspace(0, len(places) - 1, min(_KNOTS, len(places))).astype(int))
        table = places[kept].tolist(), (quantile * scale[first][kept]).tolist()
    beyond = held_out.errors[held_out.outside]
    outside = conformal_quantile(beyond) if len(beyond) >= 2 else 0.0
    return {"places": table[0], "half": table[1], "outside": outside}


def conformal_noise(noise: float) -> float:
    """The half-width where only the spread between samples is known."""
    return 1.645 * noise


def conformal_quantile(scores: Floats, level: float = LEVEL) -> float:
    """The smallest score that the next one stays below with probability `level`.

    With too few scores for that, the largest.
    """
    if not len(scores):
        return 0.0
    rank = min(len(scores), math.ceil((len(scores) + 1) * level))
    return float(np.sort(scores)[rank - 1])


def _scores(held_out: HeldOut) -> Floats:
    """Errors per local scale; a point's own error does not count in its scale."""
    if len(held_out) < 2:
        return np.ones(len(held_out))
    return held_out.errors / _scale(held_out, leave_out=True)


def _scale(held_out: HeldOut, leave_out: bool) -> Floats:
    """Of each point, the mean error of those near its place, drawn to the mean of all."""
    number = len(held_out)
    near = min(number - 1, max(5, number // 6))
    order = np.argsort(held_out.places)
    errors = held_out.errors[order]
    scale = np.empty(number)
    for rank in range(number):
        # The window may be cut at the ends: then it lies to one side.
        start = min(max(rank - near // 2, 0), number - near - 1)
        window = errors[start : start + near + 1]
        total, count, everything = window.sum(), len(window), errors.sum()
        whole = number
        if leave_out:
            total, count = total - errors[rank], count - 1
            everything, whole = everything - errors[rank], number - 1
        scale[order[rank]] = (total + 2 * everything / whole) / (count + 2)
    return np.maximum(scale, 1e-6)
