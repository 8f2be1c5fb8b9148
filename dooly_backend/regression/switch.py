"""Another kernel from a size on: two predictors, each for the points on its side.

vLLM's Triton attention divides a decode's keys among thread blocks up to 16 requests (8
key-value heads on an H200) and no more from 17 on, where it takes nearly twice as long.
No trend has such a step, and what follows it smoothly is wrong on both sides. Where the
switch lies is found by what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.models import Parameters, Predictor, Training, Written
from dooly_backend.regression.scalar import Code, literal

_GAIN = 0.7  # of the squared error of one trend; two are worth their parameters below that
_SMALL = 0.01  # a mean relative error of one trend that needs no second one
_FEWEST = 30  # points on each side
_MOST_TO_TRY = 24  # places

Fit = Callable[[Training, Parameters | None], Parameters]


@dataclass(frozen=True)
class Errors:
    """How well a trend describes points: relative errors, squared and summed.

    `of_all` with everything a trend can do, so that a switch is not what else explains,
    `of_side` of one that is quick to fit, for many places.
    """

    of_all: Callable[[Training], float]
    of_side: Callable[[Training], float]


def fit_switched(
    data: Training,
    feature: str | None,
    fit: Fit,
    errors: Errors,
    earlier: Parameters | None,
) -> Parameters:
    """What `fit` learns from all points, or from those on each side of a switch of `feature`.

    Whether there is a switch, and where, is taken from `earlier`, if given.
    """
    if earlier is not None:
        at = earlier["switch"]["at"] if "switch" in earlier else None
    else:
        at = None if feature is None else best_place(data, feature, errors)
    if at is None or feature is None:
        return fit(data, earlier)
    below = data.column(feature) <= at
    sides = {"below": data.only(below), "above": data.only(~below)}
    learned: dict[str, Any] = {
        name: fit(side, None if earlier is None else earlier["switch"][name])
        for name, side in sides.items()
    }
    return {"switch": {"feature": feature, "at": at, **learned}}


def best_place(data: Training, feature: str, errors: Errors) -> float | None:
    """The last value of `feature` ahead of a switch; None where one trend will do."""
    values = data.column(feature)
    places = [
        float(place)
        for place in np.unique(values)
        if min((values <= place).sum(), (values > place).sum()) >= _FEWEST
    ]
    if not places:
        return None
    of_one = errors.of_all(data)
    if of_one < len(data) * _SMALL**2:
        return None
    chosen = np.linspace(0, len(places) - 1, min(len(places), _MOST_TO_TRY)).astype(int)
    of_two = {
        places[i]: errors.of_side(data.only(values <= places[i]))
        + errors.of_side(data.only(values > places[i]))
        for i in np.unique(chosen)
    }
    best = min(of_two, key=of_two.__getitem__)
    sides = values <= best, values > best
    return best if sum(errors.of_all(data.only(side)) for side in sides) < _GAIN * of_one else None


class Switched(Written):
    """One of two predictors of a phase, by a feature of the batch."""

    def __init__(self, column: int, at: float, below: Predictor, above: Predictor) -> None:
        self._column, self._at = column, at
        self._below, self._above = below, above

    def many(self, rows: Floats) -> Floats:
        is_below = rows[:, self._column] <= self._at
        if is_below.all():
            return self._below.many(rows)
        if not is_below.any():
            return self._above.many(rows)
        us = np.empty(len(rows))
        us[is_below] = self._below.many(rows[is_below])
        us[~is_below] = self._above.many(rows[~is_below])
        return us

    def write(self, code: Code) -> str:
        us = code.name()
        with code.block(f"if {code.feature(self._column)} <= {literal(self._at)}"):
            code.line(f"{us} = {self._below.write(code)}")
        with code.block("else"):
            code.line(f"{us} = {self._above.write(code)}")
        return us


def load_switched(
    parameters: Parameters, features: tuple[str, ...], load: Callable[[Parameters], Predictor]
) -> Predictor:
    """Raises KeyError, TypeError or ValueError for parameters of another shape."""
    if "switch" not in parameters:
        return load(parameters)
    switch = parameters["switch"]
    sides = load(switch["below"]), load(switch["above"])
    return Switched(features.index(switch["feature"]), float(switch["at"]), *sides)
