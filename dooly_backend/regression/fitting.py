"""Fitting a signature: the regressor that is best at points it has not seen.

    fitted = fit_signature(signature, measurements)
    fitted.predictor.predict_batches([Batch.parse("1x512+0,8x1+1024")])

Every regressor of the signature's kind is cross-validated over the measured
points; what counts is the mean relative error where the held-out point lies
inside the range of the others. Another than the baseline is chosen only where
it is better by more than chance.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dooly_backend.database.records import Measurement, Signature
from dooly_backend.errors import InputError
from dooly_backend.regression import models
from dooly_backend.regression.batches import Floats
from dooly_backend.regression.compositions import Composer
from dooly_backend.regression.domain import Domain, domain_of
from dooly_backend.regression.features import facts_of, features_of, known_features, point_matrix
from dooly_backend.regression.intervals import (
    HeldOut,
    Interval,
    Intervals,
    nothing_held_out,
    places_of,
)
from dooly_backend.regression.models import Parameters, Regressor, Training, UnfitError
from dooly_backend.regression.prediction import SignaturePredictor

_FOLDS = 10
#: How much better than the baseline a regressor must be, in standard errors of the difference.
_MARGIN = 1.0
_WORTH = 1e-3  # and in its mean relative error
_SHORTEST_US = 0.01
#: Points that take longer to learn from than processes to start.
_WORTH_PROCESSES = 1500


@dataclass(frozen=True)
class Choice:
    """The regressor chosen for a signature, and what cross-validation says of all.

    `errors` are mean relative errors (|log(measured / predicted)|) by regressor.
    """

    model: str
    parameters: Parameters = field(repr=False)
    errors: Mapping[str, float]
    held_out: HeldOut = field(repr=False)


@dataclass(frozen=True)
class FittedSignature:
    """All that a prediction of a signature needs, as plain data."""

    signature: Signature
    features: tuple[str, ...]
    facts: Mapping[str, float]
    model: str
    parameters: Parameters = field(repr=False)
    domain: Mapping[str, Any]
    interval: Mapping[str, Any] = field(repr=False)
    errors: Mapping[str, float]
    points: int

    @cached_property
    def predictor(self) -> SignaturePredictor:
        """Raises InputError for a regressor or feature that is not registered."""
        kind = self.signature.kind
        models.load_plugins()
        features = known_features(kind, self.features)
        predictor = models.load(self.model, self.parameters, self.features)
        try:
            domain, interval = (
                Domain(kind, self.domain, self.features),
                Interval(self.interval),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"the range or the interval of {self.signature.name} cannot be used "
                f"({type(error).__name__}: {error}): fit again with `dooly fit`"
            ) from error
        name = self.signature.name
        return SignaturePredictor(name, kind, features, self.facts, predictor, domain, interval)


def training_of(signature: Signature, measurements: Sequence[Measurement]) -> Training:
    """Measured points as arrays. Raises InputError where there are none."""
    models.load_plugins()
    features = features_of(signature.kind)
    rows = point_matrix(features, [m.point for m in measurements], facts_of(signature))
    if not measurements:
        raise InputError(f"{signature.name} has no measurements to learn from: profile it")
    # What a timer cannot tell from nothing has no logarithm.
    us = np.maximum([m.median_us for m in measurements], _SHORTEST_US)
    noise = np.array([_standard_error(m) for m in measurements])
    return Training(signature.kind, tuple(f.name for f in features), rows, us, noise)


def _standard_error(measurement: Measurement) -> float:
    """Of the median, relative to it; that of a normal distribution's is 1.25 of the mean's."""
    count = len(measurement.samples_us)
    return 1.25 * _spread(measurement) / count**0.5


def _spread(measurement: Measurement) -> float:
    """Of the samples, relative to their median."""
    return measurement.std_us / max(measurement.median_us, _SHORTEST_US)


def fit_signature(
    signature: Signature, measurements: Sequence[Measurement], only: Iterable[str] = ()
) -> FittedSignature:
    """The best regressor of one signature, or the best of those named `only`."""
    return fit_signatures({signature: measurements}, only)[signature]


def fit_signatures(
    measured: Mapping[Signature, Sequence[Measurement]], only: Iterable[str] = ()
) -> dict[Signature, FittedSignature]:
    """The best regressor of each signature; those with few points share their intervals."""
    only = tuple(only)
    data = {signature: training_of(signature, each) for signature, each in measured.items()}
    choices = dict(zip(data, _choose_all(list(data.values()), only), strict=True))
    intervals = _intervals(
        {signature: choice.held_out for signature, choice in choices.items()},
        {s: float(np.median([_spread(m) for m in each])) for s, each in measured.items()},
    )
    fitted = {}
    for signature, choice in choices.items():
        training = data[signature]
        fitted[signature] = FittedSignature(
            signature,
            training.features,
            facts_of(signature),
            choice.model,
            choice.parameters,
            domain_of(training),
            intervals[signature],
            choice.errors,
            len(training),
        )
    return fitted


def _choose_all(data: Sequence[Training], only: tuple[str, ...]) -> list[Choice]:
    """`choose` of each, in several processes where there is much to fit."""
    if sum(map(len, data)) < _WORTH_PROCESSES or (os.cpu_count() or 1) < 2:
        return [choose(each, only) for each in data]
    from joblib import Parallel, delayed

    names = [
        model.name for kind in {each.kind for each in data} for model in models.models_of(kind)
    ]
    # The largest first, so that no process is left with one of them at the end.
    order = sorted(range(len(data)), key=lambda i: -len(data[i]))
    jobs = (delayed(_choose_there)(data[i], only, sys.path, names) for i in order)
    found = dict(zip(order, Parallel(n_jobs=-1)(jobs), strict=True))
    return [found[i] or choose(each, only) for i, each in enumerate(data)]


def _choose_there(
    data: Training, only: tuple[str, ...], path: Sequence[str], names: Sequence[str]
) -> Choice | None:
    """`choose` in another process; None where it lacks a regressor that a script registered."""
    sys.path[:] = path
    return choose(data, only) if all(map(models.is_known, names)) else None


def _intervals(
    held_out: Mapping[Signature, HeldOut], spreads: Mapping[Signature, float]
) -> dict[Signature, dict[str, Any]]:
    """The interval of each signature; those of a kind learn from each other."""
    kinds = {signature.kind for signature, each in held_out.items() if len(each)}
    intervals = {}
    for kind in {signature.kind for signature in held_out}:
        # Constants have no errors: they get what others err by.
        alike = [s for s in held_out if s.kind == kind or kind not in kinds]
        learned = Intervals([held_out[s] for s in alike])
        for index, signature in enumerate(alike):
            if signature.kind == kind:
                intervals[signature] = learned.fit(index, spreads[signature])
    return intervals


def choose(data: Training, only: Iterable[str] = ()) -> Choice:
    """The regressor that errs least at held-out points. Raises InputError where none fits.

    Where none of `only` suits the signature's kind, it gets the baseline.
    """
    suiting = models.models_of(data.kind)
    wanted = {models.get_model(name).name for name in only}
    candidates = [m for m in suiting if (m.name in wanted if wanted else m.by_default)]
    candidates = candidates or suiting[:1]
    folds = _folds(data)
    tried: dict[str, tuple[Parameters, HeldOut | None]] = {}
    reasons: list[str] = []
    for candidate in candidates:
        try:
            parameters = candidate.fit(data)
            tried[candidate.name] = parameters, cross_validate(candidate, data, folds, parameters)
        except UnfitError as error:
            reasons.append(f"{candidate.name} {error}")
    if not tried:
        why = "; ".join(reasons) or f"no regressor for {data.kind} signatures is registered"
        raise InputError(f"nothing can be learned from {len(data)} points: {why}")
    errors = {name: _mean(held) for name, (_, held) in tried.items() if held is not None}
    chosen = next(iter(tried))
    best = min(errors, key=errors.__getitem__, default=chosen)
    if chosen not in errors or _is_better(tried[best][1], tried[chosen][1]):
        chosen = best
    parameters, held_out = tried[chosen]
    return Choice(
        chosen, parameters, errors, held_out if held_out is not None else nothing_held_out()
    )


def cross_validate(
    regressor: Regressor, data: Training, folds: Sequence[Any], whole: Parameters
) -> HeldOut | None:
    """Errors at every point, predicted without it; None where a fold cannot be fitted."""
    if not folds:
        return None
    predicted = np.empty(len(data))
    outside = np.zeros(len(data), dtype=bool)
    for held in folds:
        rest = np.setdiff1d(np.arange(len(data)), held)
        known = data.only(rest)
        try:
            domain = Domain(data.kind, domain_of(known), data.features)
            outside[held] = domain.outside(data.rows[held])
            learned = regressor.fit(known, earlier=whole)
        except (UnfitError, InputError):
            return None
        predictor = regressor.load(learned, data.features)
        predicted[held] = predictor.many(data.rows[held])
    predicted = np.maximum(predicted, 1e-9)
    errors = np.abs(np.log(data.us / predicted))
    compositions = Composer(data.kind, data.features).many(data.rows)
    return HeldOut(places_of(data.rows, predicted), errors, outside, compositions)


def _folds(data: Training) -> list[Any]:
    """Held-out points: neighbours along an axis in different folds, others at random."""
    number = len(data)
    if number < 3:
        return []
    count = min(_FOLDS, number)
    if data.rows.shape[1] == 1:
        order = np.argsort(data.rows[:, 0], kind="stable")
    else:
        order = np.random.default_rng(0).permutation(number)
    return [np.sort(order[start::count]) for start in range(count)]


def _mean(held_out: HeldOut) -> float:
    scored = held_out.inside if len(held_out.inside) else held_out
    return float(scored.errors.mean())


def _is_better(candidate: HeldOut | None, baseline: HeldOut | None) -> bool:
    if candidate is None or baseline is None:
        return False
    scored = ~baseline.outside if not baseline.outside.all() else np.ones(len(baseline), bool)
    gain: Floats = (baseline.errors - candidate.errors)[scored]
    if len(gain) < 2:
        return False
    return bool(gain.mean() > max(_WORTH, _MARGIN * gain.std(ddof=1) / np.sqrt(len(gain))))
