"""Times along one axis: straight lines between knots, whatever chose the knots.

The baseline takes the measured points; isotonic regression and a forest, both
from scikit-learn, put theirs through the noise. A forest is what Vidur's
predictor takes. All are kept as a table, which is quick to read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.models import (
    Parameters,
    Predictor,
    Regressor,
    Training,
    UnfitError,
    floats,
    model,
)

BASELINE = "interpolation"
_FEWEST = 5  # points from which learning differs from joining them
_TREES = 16


class Table(Predictor):
    """Straight lines through `places` (rising) and `values`; it goes on along `slope`."""

    def __init__(self, places: Floats, values: Floats, slope: float) -> None:
        if len(places) != len(values) or not len(places) or (np.diff(places) <= 0).any():
            raise ValueError("a table needs rising places, and a value for each")
        self._places, self._values, self._slope = places, values, slope
        self._place_list: list[float] = places.tolist()
        self._value_list: list[float] = values.tolist()

    def many(self, rows: Floats) -> Floats:
        place = rows[:, 0]
        beyond = np.maximum(place - self._places[-1], 0.0)
        return np.interp(place, self._places, self._values) + self._slope * beyond

    def one(self, row: Sequence[float]) -> float:
        place, places, values = row[0], self._place_list, self._value_list
        index = bisect_left(places, place)
        if index == len(places):
            return values[-1] + self._slope * (place - places[-1])
        if index == 0 or places[index] == place:
            return values[index]
        low, value = places[index - 1], values[index - 1]
        return value + (place - low) / (places[index] - low) * (values[index] - value)


class _Tabulated(Regressor):
    """What is learned is a table."""

    def load(self, parameters: Parameters, features: tuple[str, ...]) -> Predictor:
        places, values = floats(parameters["places"], 1), floats(parameters["values"], 1)
        return Table(places, values, float(parameters["slope"]))


@model
class Interpolation(_Tabulated):
    """The baseline: through every measured point."""

    name = BASELINE
    is_baseline = True
    kinds = ("constant", "tokens", "requests")

    def fit(self, data: Training, earlier: Parameters | None = None) -> Parameters:
        if data.kind == "constant":
            return table_of(np.zeros(1), data.us[:1])
        order = np.argsort(data.rows[:, 0])
        return table_of(data.rows[order, 0], data.us[order])

    def load(self, parameters: Parameters, features: tuple[str, ...]) -> Predictor:
        table = super().load(parameters, features)
        return table if features else Constant(float(parameters["values"][0]))


class Constant(Predictor):
    """The same time for every batch."""

    def __init__(self, us: float) -> None:
        self._us = us

    def many(self, rows: Floats) -> Floats:
        return np.full(len(rows), self._us)

    def one(self, row: Sequence[float]) -> float:
        return self._us


@model
class Isotonic(_Tabulated):
    """Never falling: neighbours that noise puts in the wrong order share their mean."""

    name = "isotonic"
    kinds = ("tokens", "requests")

    def fit(self, data: Training, earlier: Parameters | None = None) -> Parameters:
        from sklearn.isotonic import IsotonicRegression

        _enough(data)
        order = np.argsort(data.rows[:, 0])
        places, us = data.rows[order, 0], data.us[order]
        logs = IsotonicRegression().fit_transform(places, np.log(us))
        return table_of(places, np.exp(logs))


@model
class Forest(_Tabulated):
    """A random forest's steps, from the logarithm of the times.

    Between sweep points its steps err by 10% and more, and it is the slowest to
    fit: it is there to compare with.
    """

    name = "forest"
    kinds = ("tokens", "requests")
    by_default = False

    def fit(self, data: Training, earlier: Parameters | None = None) -> Parameters:
        from sklearn.ensemble import RandomForestRegressor

        _enough(data)
        forest = RandomForestRegressor(n_estimators=_TREES, random_state=0)
        forest.fit(data.rows, np.log(data.us))
        splits = np.concatenate([_thresholds(tree.tree_) for tree in forest.estimators_])
        # A step at each threshold: a knot just before it and one just after.
        width = 1e-6
        places = np.unique(np.concatenate([splits - width, splits + width, data.rows[:, 0]]))
        values = np.exp(forest.predict(places[:, None]))
        return table_of(places, values, end=(data.rows[:, 0], data.us))


def _thresholds(tree: object) -> Floats:
    return tree.threshold[tree.feature >= 0]  # type: ignore[attr-defined]


def _enough(data: Training) -> None:
    if len(data) < _FEWEST:
        raise UnfitError(f"needs {_FEWEST} points, has {len(data)}")


def table_of(places: Floats, values: Floats, end: tuple[Floats, Floats] | None = None) -> dict:
    """Parameters of a table; `end` tells its last slope where the knots do not."""
    at, us = end if end is not None else (places, values)
    return {"places": places.tolist(), "values": values.tolist(), "slope": end_slope(at, us)}


def end_slope(places: Floats, us: Floats) -> float:
    """Microseconds per unit along the last two points; none where noise makes it fall."""
    if len(places) < 2:
        return 0.0
    before, last = np.argsort(places)[-2:]
    return float(max(0.0, (us[last] - us[before]) / (places[last] - places[before])))
