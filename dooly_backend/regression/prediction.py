"""Predictions of one signature: a time, its 90% interval, and whether it extrapolates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dooly_backend.errors import InputError
from dooly_backend.regression.batches import BatchArray, Columns, Floats, as_array
from dooly_backend.regression.compositions import Composer
from dooly_backend.regression.domain import Domain
from dooly_backend.regression.features import Facts, Feature, matrix, point_matrix
from dooly_backend.regression.intervals import Interval, is_along_feature, places_of
from dooly_backend.regression.models import Predictor
from dooly_backend.workload import Batch, PointKind, WorkloadPoint

_NUMBERS = frozenset({int, float})  # of one batch; anything else is of many


class Prediction(NamedTuple):
    """Microseconds of one call; of several batches, arrays.

    Nine of ten measurements lie between `low_us` and `high_us`; `extrapolated`
    tells that the batch is outside the measured range.
    """

    us: Any
    low_us: Any
    high_us: Any
    extrapolated: Any


class SignaturePredictor:
    """Predicts one signature's times, from features or from batches."""

    def __init__(
        self,
        name: str,
        kind: PointKind,
        features: Sequence[Feature],
        facts: Facts,
        predictor: Predictor,
        domain: Domain,
        interval: Interval,
    ) -> None:
        self.name, self.kind, self.facts = name, kind, dict(facts)
        self.features = tuple(features)
        self._names = tuple(feature.name for feature in features)
        self._predictor, self._domain, self._interval = predictor, domain, interval
        self._along = is_along_feature(len(self._names))
        self._composer = Composer(kind, self._names)

    @property
    def feature_names(self) -> tuple[str, ...]:
        return self._names

    def predict(self, features: Mapping[str, Any]) -> Prediction:
        """From a value of every feature, or arrays of the same length.

        Raises InputError for a feature that is missing or unknown, and for a
        batch with a part of which nothing was measured.
        """
        try:
            row = [features[name] for name in self._names]
        except KeyError as error:
            raise InputError(
                f"{self.name} is predicted from {self._described}: {error.args[0]!r} is missing"
            ) from None
        if len(features) > len(row):
            unknown = next(name for name in features if name not in self._names)
            raise InputError(f"{self.name} has no feature {unknown!r}, only {self._described}")
        if not _NUMBERS.issuperset(map(type, row)):
            return self.predict_rows(np.column_stack(np.broadcast_arrays(*map(_array, row))))
        return self.predict_row(row)

    def predict_row(self, row: Sequence[float]) -> Prediction:
        """From the values of the features, in their order."""
        us = self._predictor.one(row)
        outside = self._domain.is_outside(row)
        place = row[0] if self._along else us
        unfamiliar, composition = self._domain.is_unfamiliar(row), self._composer.one(row)
        factor = math.exp(self._interval.one(place, outside, unfamiliar, composition))
        return Prediction(us, us / factor, us * factor, outside)

    def predict_rows(self, rows: Floats) -> Prediction:
        """From a row for each batch, a column for each feature."""
        outside = self._domain.outside(rows)
        us = self._predictor.many(rows)
        unfamiliar, compositions = self._domain.unfamiliar(rows), self._composer.many(rows)
        half = self._interval.many(places_of(rows, us), outside, unfamiliar, compositions)
        factor = np.exp(half)
        return Prediction(us, us / factor, us * factor, outside)

    def times(self, rows: Floats) -> Floats:
        """The times alone."""
        return self._predictor.many(rows)

    def rows(self, batches: BatchArray | Columns | Sequence[Batch]) -> Floats:
        """The features of batches: a row for each."""
        return matrix(self.features, as_array(batches), self.facts)

    def predict_batches(self, batches: BatchArray | Columns | Sequence[Batch]) -> Prediction:
        """For each batch. Experts are those expected under uniform routing."""
        return self.predict_rows(self.rows(batches))

    def predict_points(self, points: Sequence[WorkloadPoint]) -> Prediction:
        """For each workload point; one of routing tells its experts."""
        return self.predict_rows(point_matrix(self.features, points, self.facts))

    @property
    def _described(self) -> str:
        return ", ".join(self._names) or "nothing"


def _array(value: Any) -> Floats:
    return np.asarray(value, dtype=np.float64)
