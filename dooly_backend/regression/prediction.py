"""Predictions of one signature: a time, its 90% interval, and whether it extrapolates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from dooly_backend.errors import InputError
from dooly_backend.regression.batches import BatchArray, Columns, Floats, as_array
from dooly_backend.regression.compositions import Composer
from dooly_backend.regression.domain import Domain
from dooly_backend.regression.features import Facts, Feature, matrix, point_matrix
from dooly_backend.regression.intervals import Interval, is_along_feature, places_of
from dooly_backend.regression.models import Predictor
from dooly_backend.regression.scalar import Code, compiled
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
        self._values = _getter(self._names)
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
            row = self._values(features)
        except KeyError as error:
            raise InputError(
                f"{self.name} is predicted from {self._described}: {error.args[0]!r} is missing"
            ) from None
        if len(features) > len(row):
            unknown = next(name for name in features if name not in self._names)
            raise InputError(f"{self.name} has no feature {unknown!r}, only {self._described}")
        types = list(map(type, row))
        # Mostly they are all floats, which is quicker to see.
        if types.count(float) < len(row) and not _NUMBERS.issuperset(types):
            return self.predict_rows(np.column_stack(np.broadcast_arrays(*map(_array, row))))
        return self.predict_row(row)

    def predict_row(self, row: Sequence[float]) -> Prediction:
        """From the values of the features, in their order."""
        return self._one(row)

    @cached_property
    def _one(self) -> Callable[[Sequence[float]], Prediction]:
        return compiled(self._write)

    def _write(self, code: Code) -> str:
        """Lines that predict one row."""
        outside = self._domain.write_outside(code)
        us = self._predictor.write(code)
        place = code.feature(0) if is_along_feature(len(self._names)) else us
        unfamiliar, composition = self._domain.write_unfamiliar(code), self._composer.write(code)
        half = self._interval.write(code, place, outside, unfamiliar, composition)
        factor = code.let(f"exp({half})")
        # What `Prediction(...)` does, in less than half its time.
        new, of = code.bound(tuple.__new__), code.bound(Prediction)
        return code.let(f"{new}({of}, ({us}, {us} / {factor}, {us} * {factor}, {outside}))")

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in self.__dict__.items() if name != "_one"}

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


def _getter(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """What takes the values with these names from a mapping."""
    return itemgetter(*names) if len(names) > 1 else partial(_values, names)


def _values(names: Sequence[str], features: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple([features[name] for name in names])


def _array(value: Any) -> Floats:
    return np.asarray(value, dtype=np.float64)
