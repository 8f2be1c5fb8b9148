"""The `ml` predictor's model: scikit-learn alone, as the simulator has no Dooly to load it with.

A step's time is nearly a sum of curves over tokens, requests and the work of
attention. So the model is one: straight pieces along these features, plain
lines along the others, fitted to relative errors.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import joblib
import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import Ridge
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import SplineTransformer, StandardScaler

from dooly_backend.workload import Batch

from .features import FEATURES, features_of

#: Features along which the model bends.
CURVED = (
    "batch_size",
    "sum_extend",
    "sum_past",
    "sum_extend_x_past",
    "sum_extend_squared",
    "sum_attn_flops",
)
KNOTS = 8
#: Of the sampled steps, those that the error is taken of and the model has not seen.
HELD_OUT = 4  # every fourth
_PENALTY = 1e-4


@dataclass(frozen=True)
class Fitted:
    """A model that predicts seconds, and its errors on steps that it has not seen, percent."""

    model: Any
    steps: int
    held_out: int
    mape_percent: float
    p90_percent: float
    worst_percent: float

    def pickled(self) -> bytes:
        """What `joblib.load` of the simulator reads."""
        buffer = io.BytesIO()
        joblib.dump({"model": self.model, "features": list(FEATURES)}, buffer)
        return buffer.getvalue()

    def predict_s(self, batches: Sequence[Batch]) -> list[float]:
        return [float(s) for s in self.model.predict(_matrix(batches))]


def fit(batches: Sequence[Batch], seconds: Sequence[float]) -> Fitted:
    """Fitted to three of four steps; the errors are those of the fourth."""
    matrix, times = _matrix(batches), np.array(seconds)
    held_out = np.arange(len(times)) % HELD_OUT == HELD_OUT - 1
    seen = ~held_out
    model = _pipeline()
    model.fit(matrix[seen], times[seen], ridge__sample_weight=1 / times[seen] ** 2)
    errors = np.abs(100 * (model.predict(matrix[held_out]) / times[held_out] - 1))
    return Fitted(
        model,
        steps=int(seen.sum()),
        held_out=int(held_out.sum()),
        mape_percent=round(statistics.fmean(errors), 3),
        p90_percent=round(float(np.percentile(errors, 90)), 3),
        worst_percent=round(float(errors.max()), 3),
    )


def _matrix(batches: Sequence[Batch]) -> np.ndarray:
    return np.array([features_of(batch) for batch in batches], dtype=float)


def _pipeline() -> Pipeline:
    curved = [FEATURES.index(name) for name in CURVED]
    splines = SplineTransformer(KNOTS, degree=1, knots="quantile", extrapolation="linear")
    parts = ColumnTransformer(
        [("curves", splines, curved), ("lines", "passthrough", list(range(len(FEATURES))))]
    )
    ridge = Ridge(_PENALTY, solver="cholesky")
    return Pipeline([("parts", parts), ("scale", StandardScaler()), ("ridge", ridge)])
