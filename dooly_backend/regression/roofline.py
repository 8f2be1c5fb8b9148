"""A physically shaped regressor: what a launch, reading memory and computing cost.

A time is a sum of terms with coefficients that are never negative, so it never
falls where the work grows. Each term is a quantity of work, or its part above
or below a knee: above, another resource becomes the limit; below, the device is
not yet full. Coefficients make relative errors small (nonnegative least
squares, each point divided by its time).

Attention has two phases with terms of their own, prefills and decodes; joint.py says
what a batch with both takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import nnls

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.joint import LONGEST, Joint, fit_joint, load_joint
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
from dooly_backend.regression.scalar import Code, literal
from dooly_backend.regression.switch import Errors, fit_switched, load_switched
from dooly_backend.regression.waves import Waves, best_width
from dooly_backend.regression.waves import columns as columns_of_waves

_KNEES = 4  # of each term that has them
_FEWEST = 3  # points that a trend needs
_LEAST = 0.01  # of the shortest measured time: a launch
_DIVIDED = 0.75  # of the squared error: a rule of one library's must explain more to be believed


# -- one phase ------------------------------------------------------------------


class Trend(Written):
    """A launch and a sum of terms: ``coefficient * clip(feature - low, 0, high - low)``.

    And what waves of thread blocks take, where they count.
    """

    def __init__(
        self, launch: float, columns: Sequence[int], terms: Floats, waves: Waves | None = None
    ) -> None:
        """`terms` has a row (low, high, coefficient) for each of `columns`."""
        if terms.shape != (len(columns), 3) or launch < 0 or (terms < 0).any():
            raise ValueError("a trend's terms need bounds and coefficients that are not negative")
        self.launch = launch
        self._waves = waves
        self._columns = list(columns)
        self._terms: list[tuple[int, float, float, float]] = [
            (column, low, high - low, coefficient)
            for column, (low, high, coefficient) in zip(columns, terms.tolist(), strict=True)
        ]

    def many(self, rows: Floats) -> Floats:
        us = np.full(len(rows), self.launch)
        for column, low, width, coefficient in self._terms:
            us += coefficient * np.clip(rows[:, column] - low, 0.0, width)
        return us if self._waves is None else us + self._waves.many(rows)

    def write(self, code: Code) -> str:
        us = code.let(literal(self.launch))
        for column, low, width, coefficient in self._terms:
            over = code.once(f"{code.feature(column)} - {literal(low)}")
            some = f"({literal(width)} if {over} > {literal(width)} else {over})"
            with code.block(f"if {over} > 0.0"):
                code.line(f"{us} += {literal(coefficient)} * {some}")
        return us if self._waves is None else code.let(f"{us} + {self._waves.write(code)}")


#: In place of infinity, which JSON does not have.
ENDLESS = 1e300


def fit_trend(data: Training, phase: Phase, earlier: Parameters | None = None) -> Parameters:
    """The nonnegative coefficients of a phase, from points that have only it.

    The width of its waves, and whether work is divided, are those of `earlier`, if given.
    """
    if len(data) < _FEWEST:
        raise UnfitError(f"needs {_FEWEST} points of {phase.name}, has {len(data)}")
    names, bounds, design = _design(data, phase)
    wave = _wave(data, phase, design, earlier)
    if wave is not None:
        design = np.column_stack([design, *_of_waves(data, phase, *wave)])
    coefficients = _least_squares(design, data.us)[0]
    of_terms = coefficients[1 : 1 + len(names)]
    used = [i for i, coefficient in enumerate(of_terms) if coefficient > 0]
    found: dict[str, Any] = {
        # Nothing takes no time: what else is left where all terms are 0.
        "launch": max(float(coefficients[0]), _LEAST * float(data.us.min())),
        "features": [names[i] for i in used],
        "terms": [[*bounds[i], float(of_terms[i])] for i in used],
    }
    if wave is not None and phase.waves is not None:
        each, of_work = coefficients[-2:]
        width, divided = wave
        times = {"width": width, "each": float(each), "of_work": float(of_work)}
        of = phase.waves
        found["waves"] = {"blocks": of.blocks, "work": of.work, "per": of.per, "divided": divided}
        found["waves"] |= times
    return found


def errors_of(phase: Phase) -> Errors:
    """How well trends of a phase describe points, with waves and without."""

    def of_side(data: Training) -> float:
        return _least_squares(_design(data, phase)[2], data.us)[1] ** 2

    def of_all(data: Training) -> float:
        predicted = load_trend(fit_trend(data, phase), data.features).many(data.rows)
        return float(((predicted / data.us - 1) ** 2).sum())

    return Errors(of_all, of_side)


def _design(data: Training, phase: Phase) -> tuple[list[str], list[tuple[float, float]], Floats]:
    """The terms of a trend, their bounds, and what each is of each point, behind a launch's 1."""
    names: list[str] = []
    bounds: list[tuple[float, float]] = []
    for name in phase.terms:
        if np.ptp(data.column(name)) == 0:
            continue  # what never varies cannot be told from the launch: it is no cost of its own
        names.append(name)
        bounds.append((0.0, ENDLESS))
        if name in phase.bent:
            for knee in _knees(data.column(name)):
                names += [name, name]
                bounds += [(0.0, knee), (knee, ENDLESS)]
    columns = [
        np.clip(data.column(n) - low, 0, high - low)
        for n, (low, high) in zip(names, bounds, strict=True)
    ]
    return names, bounds, np.column_stack([np.ones(len(data)), *columns])


def _least_squares(design: Floats, us: Floats) -> tuple[Floats, float]:
    """Coefficients, none negative, of the least relative errors; and the root of their squares."""
    relative = design / us[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    found, error = nnls(relative / scale, np.ones(len(us)))
    return found / scale, float(error)


def _wave(
    data: Training, phase: Phase, design: Floats, earlier: Parameters | None
) -> tuple[float, bool] | None:
    """The width of waves, and whether the work of a block is divided; None without waves."""
    if phase.waves is None:
        return None
    if earlier is not None:
        known = earlier.get("waves")
        return None if known is None else (float(known["width"]), bool(known["divided"]))

    def squared_error(width: float | None, chosen: Any, divided: bool = False) -> float:
        some, part = data.only(chosen), design[chosen]
        if width is not None:
            part = np.column_stack([part, *_of_waves(some, phase, width, divided)])
        return _least_squares(part, some.us)[1] ** 2

    whole = np.arange(len(data))
    width = best_width(data.column(phase.waves.blocks), squared_error)
    if not phase.waves.divides:
        return None if width is None else (width, False)
    of_pieces = best_width(data.column(phase.waves.blocks), partial(squared_error, divided=True))
    if of_pieces is not None:
        without = squared_error(width, whole)
        if squared_error(of_pieces, whole, divided=True) < _DIVIDED * without:
            return of_pieces, True
    return None if width is None else (width, False)


def _of_waves(data: Training, phase: Phase, width: float, divided: bool) -> tuple[Floats, Floats]:
    assert phase.waves is not None
    shape = phase.waves
    blocks, work, per = (data.column(name) for name in (shape.blocks, shape.work, shape.per))
    return columns_of_waves(blocks, work, per, width, divided)


def load_trend(parameters: Parameters, features: tuple[str, ...]) -> Trend:
    """Raises KeyError, TypeError or ValueError for parameters of another shape."""
    columns = [features.index(name) for name in parameters["features"]]
    terms = floats(parameters["terms"], 2) if columns else np.empty((0, 3))
    waves = Waves(parameters["waves"], features) if "waves" in parameters else None
    return Trend(float(parameters["launch"]), columns, terms, waves)


def _knees(values: Floats) -> list[float]:
    """Places in even ratios between the smallest and the largest value."""
    known = values[values > 0]
    if not len(known) or known.min() == known.max():
        return []
    inner = np.geomspace(known.min(), known.max(), _KNEES + 2)[1:-1]
    return [float(place) for place in inner]


# -- the regressor --------------------------------------------------------------


@model
class Roofline(Regressor):
    """The terms alone. Monotone in all work."""

    name = "roofline"
    kinds = ("tokens", "requests", "routing", "batch")

    def fit(self, data: Training, earlier: Parameters | None = None) -> Parameters:
        phases = phases_of(data.kind)
        learned = {
            phase.name: fit_switched(
                data.only(alone),
                phase.switch,
                partial(_fit_trend_of, phase),
                errors_of(phase),
                None if earlier is None else earlier["phases"].get(phase.name),
            )
            for phase in phases
            if (alone := pure(data, phase)).any()
        }
        if not learned:
            raise UnfitError("needs batches of one phase")
        parameters: dict[str, Any] = {"kind": data.kind, "phases": learned}
        if len(phases) > 1:
            apart = [
                _phase_times(_load_phase(learned[p.name], data.features), data, p)
                if p.name in learned
                else np.zeros(len(data))
                for p in phases
            ]
            parameters["joint"] = fit_joint(data, *apart).parameters
        return parameters

    def load(self, parameters: Parameters, features: tuple[str, ...]) -> Predictor:
        phases = phases_of(parameters["kind"])
        parts = [
            PhasePart(_load_phase(parameters["phases"][p.name], features), p, features)
            for p in phases
            if p.name in parameters["phases"]
        ]
        joint = load_joint(parameters["joint"]) if len(phases) > 1 else None
        return PhasePredictor(parts, joint, features)


def _fit_trend_of(phase: Phase, data: Training, earlier: Parameters | None) -> Parameters:
    return fit_trend(data, phase, earlier)


def _load_phase(parameters: Parameters, features: tuple[str, ...]) -> Predictor:
    return load_switched(parameters, features, lambda each: load_trend(each, features))


def _phase_times(trend: Predictor, data: Training, phase: Phase) -> Floats:
    return np.where(present(data, phase), trend.many(data.rows), 0.0)


class PhasePart(Written):
    """One phase: 0 where a batch does not have it."""

    def __init__(self, times: Predictor, phase: Phase, features: tuple[str, ...]) -> None:
        self._times = times
        self.column = features.index(phase.present) if phase.present is not None else None

    def many(self, rows: Floats) -> Floats:
        return self._times.many(rows)

    def write(self, code: Code) -> str:
        return self._times.write(code)


class PhasePredictor(Written):
    """The phases of a batch together."""

    def __init__(
        self, parts: Sequence[PhasePart], joint: Joint | None, features: tuple[str, ...]
    ) -> None:
        if not parts:
            raise ValueError("there is no phase")
        self._parts, self._joint = list(parts), joint
        self._longest = features.index(LONGEST) if joint is not None else -1

    def many(self, rows: Floats) -> Floats:
        times = [self._part(part, rows) for part in self._parts]
        if len(times) == 1:
            return times[0]
        assert self._joint is not None
        one, other = times
        return self._joint.many(one, other, rows[:, self._longest])

    def _part(self, part: PhasePart, rows: Floats) -> Floats:
        if part.column is None:
            return part.many(rows)
        some = rows[:, part.column] > 0
        if some.all():
            return part.many(rows)
        us = np.zeros(len(rows))
        if some.any():
            us[some] = part.many(rows[some])
        return us

    def write(self, code: Code) -> str:
        if self._joint is None:
            return self._parts[0].write(code)
        us = code.let("0.0")
        columns = [part.column for part in self._parts]
        has = [f"{code.feature(column)} > 0.0" for column in columns if column is not None]
        head = "if"
        if len(has) > 1:
            with code.block(f"if {' and '.join(has)}"):
                code.line(f"{us} = {self._write_both(code, *self._parts)}")
            head = "elif"
        for part, is_there in zip(self._parts, has, strict=True):
            with code.block(f"{head} {is_there}"):
                code.line(f"{us} = {part.write(code)}")
            head = "elif"
        return us

    def _write_both(self, code: Code, one: PhasePart, other: PhasePart) -> str:
        """Lines for a batch with both phases."""
        assert self._joint is not None
        times = one.write(code), other.write(code)
        return self._joint.write(code, *times, code.feature(self._longest))
