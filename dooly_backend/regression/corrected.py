"""The roofline, corrected by a Gaussian process: what the terms leave over, in logarithms.

The roofline (roofline.py) knows how a time grows, also beyond what was measured;
the process (scikit-learn's, Matern 3/2) follows what the kernels really do
between the measured points, which may lie anywhere. Its coordinates are held
at the edge of the measured range, so that beyond it the terms alone decide.
Each phase of attention has a process of its own, and so have mixed batches
where enough of them were measured and it predicts those that it has not seen.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.joint import LONGEST, Joint, fit_joint, load_joint
from dooly_backend.regression.lattice import MOST_AXES, Lattice
from dooly_backend.regression.models import (
    Parameters,
    Predictor,
    Regressor,
    Training,
    UnfitError,
    Written,
    floats,
    model,
)
from dooly_backend.regression.phases import Phase, phases_of, present, pure
from dooly_backend.regression.roofline import (
    PhasePart,
    PhasePredictor,
    errors_of,
    fit_trend,
    load_trend,
)
from dooly_backend.regression.scalar import Code, literal
from dooly_backend.regression.switch import fit_switched, load_switched

_FEWEST = 6  # points of a phase
_FEWEST_MIXED = 12
_FOLDS = 5
_MOST_TO_TUNE = 150  # points; the search for length scales grows with their cube
_LENGTHS = (0.3, 30.0)  # bounds, in logarithms of the coordinates
_VARIANCES = (1e-5, 1.0)
_NOISE = (1e-5, 1e-2)
# Where the search for the likeliest begins: variance, lengths, noise. From the first alone it ended
# at another optimum for 30 of 320 processes of builtin:h200, and at which one hung on the
# host's rounding; these three found, for each, the likeliest that any of six starts did.
_STARTS = ((0.01, 1.0, 1e-4), (0.01, 0.4, 1e-4), (1e-3, 1.0, 1e-3))
_ROOT_3 = math.sqrt(3.0)


class Process:
    """A fitted Gaussian process: the logarithm of measured over trend.

    With few axes it is read from a table (lattice.py), else worked out.
    """

    def __init__(self, parameters: Parameters) -> None:
        """Raises KeyError, TypeError or ValueError for parameters of another shape."""
        points = floats(parameters["points"], 2)
        lengths = floats(parameters["lengths"], 1)
        self._weights = floats(parameters["weights"], 1)
        if points.shape != (len(self._weights), len(lengths)) or (lengths <= 0).any():
            raise ValueError("a process needs a weight for each point, a length for each axis")
        self._low, self._high = points.min(axis=0), points.max(axis=0)
        self._scale = _ROOT_3 / lengths
        scaled = points * self._scale
        # |x - p|^2 = |x|^2 + |p|^2 - 2 x.p is one product with these.
        self._minus_two = np.ascontiguousarray(-2 * scaled.T)
        self._squares = (scaled**2).sum(axis=1)
        self._largest = float(parameters["largest"])
        self._lattice: Lattice | None = None
        if (self._high > self._low).sum() <= MOST_AXES:
            self._lattice = Lattice(self._exact, self._low, self._high, lengths)

    def many(self, coordinates: Floats) -> Floats:
        if self._lattice is not None:
            return self._lattice.many(coordinates)
        return self._exact(coordinates)

    def write(self, code: Code, coordinates: Sequence[str]) -> str:
        """The same for one place, as lines; `coordinates` are names, as is the result."""
        if self._lattice is not None:
            return self._lattice.write(code, coordinates)
        return code.let(f"{code.bound(self._exact_one)}({', '.join(coordinates)})")

    def _exact_one(self, *coordinates: float) -> float:
        return float(self._exact(np.array([coordinates]))[0])

    def _exact(self, coordinates: Floats) -> Floats:
        scaled = np.clip(coordinates, self._low, self._high) * self._scale
        squared = scaled @ self._minus_two
        squared += self._squares
        squared += (scaled**2).sum(axis=1)[:, None]
        distance = np.sqrt(np.maximum(squared, 0.0, out=squared), out=squared)
        kernel = np.exp(-distance)
        kernel *= distance + 1.0
        return np.clip(kernel @ self._weights, -self._largest, self._largest)


def fit_process(
    points: Floats, residuals: Floats, noise: Floats, earlier: Parameters | None
) -> Parameters:
    """What a process learns from `residuals`; length scales are those of `earlier`, if given."""
    hyper = earlier["hyper"] if earlier is not None else _tuned(points, residuals, noise)
    lengths = np.array(hyper["lengths"])
    scaled = points * (_ROOT_3 / lengths)
    distance = np.sqrt(((scaled[:, None, :] - scaled[None, :, :]) ** 2).sum(axis=2))
    kernel = hyper["variance"] * (1 + distance) * np.exp(-distance)
    kernel[np.diag_indices_from(kernel)] += hyper["noise"] + noise**2
    try:
        weights = hyper["variance"] * np.linalg.solve(kernel, residuals)
    except np.linalg.LinAlgError as error:
        raise UnfitError(f"cannot tell its points apart: {error}") from error
    return {
        "hyper": hyper,
        "points": points.tolist(),
        "lengths": lengths.tolist(),
        "weights": weights.tolist(),
        "largest": float(np.abs(residuals).max()) + 1e-9,
    }


def _tuned(points: Floats, residuals: Floats, noise: Floats) -> dict[str, Any]:
    """Variance, lengths and noise that make the residuals most likely."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    if len(points) > _MOST_TO_TUNE:
        chosen = np.linspace(0, len(points) - 1, _MOST_TO_TUNE).astype(int)
        points, residuals, noise = points[chosen], residuals[chosen], noise[chosen]
    moving = np.ptp(points, axis=0) > 0  # an axis along which nothing was measured says nothing
    lengths = np.full(points.shape[1], _LENGTHS[1])
    if not moving.any():
        return {"variance": _VARIANCES[0], "lengths": lengths.tolist(), "noise": _NOISE[1]}
    searches = []
    for variance, length, white_noise in _STARTS:
        kernel = ConstantKernel(variance, _VARIANCES) * Matern(
            np.full(moving.sum(), length), _LENGTHS, nu=1.5
        ) + WhiteKernel(white_noise, _NOISE)
        process = GaussianProcessRegressor(kernel, alpha=noise**2 + 1e-10)
        with warnings.catch_warnings():
            # A length at its bound is an answer.
            warnings.simplefilter("ignore", ConvergenceWarning)
            searches.append(process.fit(points[:, moving], residuals))
    likeliest = max(searches, key=lambda search: search.log_marginal_likelihood_value_)
    signal, white = likeliest.kernel_.k1, likeliest.kernel_.k2
    lengths[moving] = signal.k2.length_scale
    return {
        "variance": float(signal.k1.constant_value),
        "lengths": lengths.tolist(),
        "noise": float(white.noise_level),
    }


# -- coordinates ----------------------------------------------------------------


class Coordinates:
    """Where rows lie: logarithms of features, per another feature, plus an offset."""

    def __init__(
        self, axes: Sequence[tuple[str, str | None, float]], features: tuple[str, ...]
    ) -> None:
        self._axes = [
            (features.index(name), None if per is None else features.index(per), offset)
            for name, per, offset in axes
        ]

    def many(self, rows: Floats) -> Floats:
        columns = [
            (rows[:, column] / rows[:, per] if per is not None else rows[:, column]) + offset
            for column, per, offset in self._axes
        ]
        return np.log(np.column_stack(columns))

    def write(self, code: Code) -> list[str]:
        """The same of one row, as lines; the names of the coordinates."""
        names = []
        for column, per, offset in self._axes:
            value = code.feature(column)
            if per is not None:
                value += f" / {code.feature(per)}"
            names.append(code.once(f"log({value} + {literal(offset)})"))
        return names


# -- the regressor --------------------------------------------------------------


@model
class Corrected(Regressor):
    """The roofline with a Gaussian process on what it leaves over."""

    name = "corrected"
    kinds = ("tokens", "requests", "routing", "batch")

    def fit(self, data: Training, earlier: Parameters | None = None) -> Parameters:
        phases = phases_of(data.kind)
        learned: dict[str, Any] = {}
        apart: list[Floats] = []
        for phase in phases:
            us = np.zeros(len(data))
            alone = pure(data, phase)
            if alone.any():
                before = earlier["phases"].get(phase.name) if earlier is not None else None
                learned[phase.name] = fit_switched(
                    data.only(alone),
                    phase.switch,
                    partial(_fit_phase, phase),
                    errors_of(phase),
                    before,
                )
                part = _load_phase(learned[phase.name], phase, data.features)
                some = present(data, phase)
                us[some] = part.many(data.rows[some])
            apart.append(us)
        if not learned:
            raise UnfitError("needs batches of one phase")
        parameters: dict[str, Any] = {"kind": data.kind, "phases": learned}
        if len(phases) > 1:
            joint = fit_joint(data, *apart)
            parameters["joint"] = joint.parameters
            parameters["mixed"] = _fit_mixed(data, joint, apart, earlier)
        return parameters

    def load(self, parameters: Parameters, features: tuple[str, ...]) -> Predictor:
        phases = phases_of(parameters["kind"])
        parts = [
            _load_phase(parameters["phases"][phase.name], phase, features)
            for phase in phases
            if phase.name in parameters["phases"]
        ]
        if len(phases) == 1:
            return PhasePredictor(parts, None, features)
        joint = load_joint(parameters["joint"])
        if parameters["mixed"] is None:
            return PhasePredictor(parts, joint, features)
        mixed = parameters["mixed"]
        place = mixed_coordinates(features, mixed["axes"])
        return _Mixed(parts, joint, features, Process(mixed), place)


def _fit_phase(phase: Phase, data: Training, earlier: Parameters | None) -> Parameters:
    if len(data) < _FEWEST:
        raise UnfitError(f"needs {_FEWEST} points of {phase.name}, has {len(data)}")
    trend = fit_trend(data, phase, earlier["trend"] if earlier is not None else None)
    residuals = np.log(data.us / load_trend(trend, data.features).many(data.rows))
    points = Coordinates(phase.coordinates, data.features).many(data.rows)
    before = earlier["process"] if earlier is not None else None
    return {"trend": trend, "process": fit_process(points, residuals, data.noise, before)}


def _load_phase(parameters: Parameters, phase: Phase, features: tuple[str, ...]) -> PhasePart:
    times = load_switched(parameters, features, lambda each: _CorrectedTrend(each, phase, features))
    return PhasePart(times, phase, features)


class _CorrectedTrend(Written):
    def __init__(self, parameters: Parameters, phase: Phase, features: tuple[str, ...]) -> None:
        self._trend = load_trend(parameters["trend"], features)
        self._process = Process(parameters["process"])
        self._coordinates = Coordinates(phase.coordinates, features)

    def many(self, rows: Floats) -> Floats:
        return self._trend.many(rows) * np.exp(self._process.many(self._coordinates.many(rows)))

    def write(self, code: Code) -> str:
        left = self._process.write(code, self._coordinates.write(code))
        return code.let(f"{self._trend.write(code)} * exp({left})")


# -- mixed batches --------------------------------------------------------------


def mixed_coordinates(
    features: tuple[str, ...], chosen: Sequence[int] | None = None
) -> Coordinates:
    """Both phases' axes, the number of prefills and the unevenness of decodes among them.

    Or the `chosen` ones of them. Raises IndexError for one that there is not.
    """
    axes = [axis for phase in phases_of("batch") for axis in phase.coordinates]
    return Coordinates(axes if chosen is None else [axes[i] for i in chosen], features)


def _fit_mixed(
    data: Training, joint: Joint, apart: list[Floats], earlier: Parameters | None
) -> Parameters | None:
    """What the joint rule leaves over in mixed batches; None where that cannot be learned.

    `earlier` are the regressor's parameters from more points, whose choice is kept.
    """
    both = (apart[0] > 0) & (apart[1] > 0)
    if both.sum() < _FEWEST_MIXED or (earlier is not None and earlier["mixed"] is None):
        return None
    longest = data.column(LONGEST)[both]
    residuals = np.log(data.us[both] / joint.many(apart[0][both], apart[1][both], longest))
    points = mixed_coordinates(data.features).many(data.rows[both])
    noise = data.noise[both]
    before = earlier["mixed"] if earlier is not None else None
    axes = _telling(points, residuals, noise) if before is None else before["axes"]
    points = points[:, axes]
    if before is None and not _learns(points, residuals, noise):
        return None
    return {**fit_process(points, residuals, noise, before), "axes": axes}


def _telling(points: Floats, residuals: Floats, noise: Floats) -> list[int]:
    """The axes along which the residuals change most: so many that a table can hold.

    Worked out along all of them, a prediction takes several times as long.
    """
    lengths = np.array(_tuned(points, residuals, noise)["lengths"])
    bends = np.ptp(points, axis=0) / lengths
    most = np.argsort(-bends, kind="stable")[:MOST_AXES]
    return sorted(int(axis) for axis in most)


def _learns(points: Floats, residuals: Floats, noise: Floats) -> bool:
    """Whether a process brings residuals that it has not seen closer to nothing.

    Few batches in as many axes as mixed ones have are learned by heart: the gain at
    left-out ones must exceed its standard error. How far a process looks along each axis
    is tuned once, on all of them: that is a few numbers, and most of the time.
    """
    whole = {"hyper": _tuned(points, residuals, noise)}
    folds = np.arange(len(points)) % _FOLDS
    gains = np.zeros(len(points))
    for fold in range(_FOLDS):
        held = folds == fold
        seen = fit_process(points[~held], residuals[~held], noise[~held], whole)
        left = residuals[held] - Process(seen).many(points[held])
        gains[held] = np.abs(residuals[held]) - np.abs(left)
    return bool(gains.mean() > gains.std(ddof=1) / math.sqrt(len(gains)))


class _Mixed(PhasePredictor):
    def __init__(
        self,
        parts: Sequence[PhasePart],
        joint: Joint,
        features: tuple[str, ...],
        process: Process,
        place: Coordinates,
    ) -> None:
        super().__init__(parts, joint, features)
        if len(parts) != 2:
            raise ValueError("mixed batches need both phases")
        self._process, self._place = process, place
        self._columns = [part.column for part in parts if part.column is not None]

    def many(self, rows: Floats) -> Floats:
        us = super().many(rows)
        both = (rows[:, self._columns] > 0).all(axis=1)
        if both.any():
            us[both] *= np.exp(self._process.many(self._place.many(rows[both])))
        return us

    def _write_both(self, code: Code, one: PhasePart, other: PhasePart) -> str:
        place = self._place.write(code)  # before the phases, which share them
        us = super()._write_both(code, one, other)
        return code.let(f"{us} * exp({self._process.write(code, place)})")
