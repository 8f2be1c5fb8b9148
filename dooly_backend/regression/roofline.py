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
from dataclasses import dataclass
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
    floats,
    model,
)
from dooly_backend.workload import PointKind

_KNEES = 4  # of each term that has them
_FEWEST = 3  # points that a trend needs
_LEAST = 0.01  # of the shortest measured time: a launch


@dataclass(frozen=True)
class Phase:
    """A part of a batch with a time of its own.

    `present` is the feature that is above 0 where the batch has this part
    (None: always). `terms` are features that the time is linear in, `bent`
    those of them that may have knees. `coordinates` are where the points lie
    for what the terms leave over (corrected.py): logarithms of a feature
    per another feature, plus an offset.
    """

    name: str
    present: str | None
    terms: tuple[str, ...]
    bent: tuple[str, ...]
    coordinates: tuple[tuple[str, str | None, float], ...]


PHASES: dict[PointKind, tuple[Phase, ...]] = {
    "tokens": (Phase("all", None, ("num_tokens",), ("num_tokens",), (("num_tokens", None, 0.0),)),),
    "requests": (Phase("all", None, ("num_reqs",), ("num_reqs",), (("num_reqs", None, 0.0),)),),
    "routing": (
        Phase(
            "all",
            None,
            ("num_tokens", "experts"),
            ("num_tokens", "experts"),
            (("num_tokens", None, 0.0), ("experts", None, 0.0)),
        ),
    ),
    "batch": (
        Phase(
            "prefills",
            "prefills",
            ("prefills", "prefill_tokens", "prefill_pairs", "prefill_keys"),
            ("prefill_tokens", "prefill_pairs"),
            (
                ("prefill_tokens", None, 0.0),
                ("prefill_query_context", "prefill_tokens", 64.0),
                ("prefills", None, 0.0),
            ),
        ),
        Phase(
            "decodes",
            "decodes",
            ("decodes", "decode_keys", "decode_longest"),
            ("decodes", "decode_keys", "decode_longest"),
            (
                ("decodes", None, 0.0),
                ("decode_keys", "decodes", 64.0),
                ("decode_unevenness", None, 0.0),
            ),
        ),
    ),
}


def phases_of(kind: PointKind) -> tuple[Phase, ...]:
    return PHASES[kind]


def present(data: Training, phase: Phase) -> Any:
    """Of each point, whether it has this phase."""
    if phase.present is None:
        return np.ones(len(data), dtype=bool)
    return data.column(phase.present) > 0


def pure(data: Training, phase: Phase) -> Any:
    """Of each point, whether it has this phase and no other."""
    alone = present(data, phase)
    for other in phases_of(data.kind):
        if other is not phase:
            alone = alone & ~present(data, other)
    return alone


# -- one phase ------------------------------------------------------------------


class Trend:
    """A launch and a sum of terms: ``coefficient * clip(feature - low, 0, high - low)``."""

    def __init__(self, launch: float, columns: Sequence[int], terms: Floats) -> None:
        """`terms` has a row (low, high, coefficient) for each of `columns`."""
        if terms.shape != (len(columns), 3) or launch < 0 or (terms < 0).any():
            raise ValueError("a trend's terms need bounds and coefficients that are not negative")
        self.launch = launch
        self._columns = list(columns)
        self._terms: list[tuple[int, float, float, float]] = [
            (column, low, high - low, coefficient)
            for column, (low, high, coefficient) in zip(columns, terms.tolist(), strict=True)
        ]

    def many(self, rows: Floats) -> Floats:
        us = np.full(len(rows), self.launch)
        for column, low, width, coefficient in self._terms:
            us += coefficient * np.clip(rows[:, column] - low, 0.0, width)
        return us

    def one(self, row: Sequence[float]) -> float:
        us = self.launch
        for column, low, width, coefficient in self._terms:
            over = row[column] - low
            if over > 0:
                us += coefficient * (width if over > width else over)
        return us


#: In place of infinity, which JSON does not have.
ENDLESS = 1e300


def fit_trend(data: Training, phase: Phase) -> Parameters:
    """The nonnegative coefficients of a phase, from points that have only it."""
    if len(data) < _FEWEST:
        raise UnfitError(f"needs {_FEWEST} points of {phase.name}, has {len(data)}")
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
    design = np.column_stack([np.ones(len(data)), *columns]) / data.us[:, None]
    scale = np.maximum(design.max(axis=0), 1e-300)
    coefficients = nnls(design / scale, np.ones(len(data)))[0] / scale
    used = [i for i, coefficient in enumerate(coefficients[1:]) if coefficient > 0]
    return {
        # Nothing takes no time: what else is left where all terms are 0.
        "launch": max(float(coefficients[0]), _LEAST * float(data.us.min())),
        "features": [names[i] for i in used],
        "terms": [[*bounds[i], float(coefficients[1 + i])] for i in used],
    }


def load_trend(parameters: Parameters, features: tuple[str, ...]) -> Trend:
    """Raises KeyError, TypeError or ValueError for parameters of another shape."""
    columns = [features.index(name) for name in parameters["features"]]
    terms = floats(parameters["terms"], 2) if columns else np.empty((0, 3))
    return Trend(float(parameters["launch"]), columns, terms)


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
            phase.name: fit_trend(data.only(alone), phase)
            for phase in phases
            if (alone := pure(data, phase)).any()
        }
        if not learned:
            raise UnfitError("needs batches of one phase")
        parameters: dict[str, Any] = {"kind": data.kind, "phases": learned}
        if len(phases) > 1:
            apart = [
                _phase_times(load_trend(learned[p.name], data.features), data, p)
                if p.name in learned
                else np.zeros(len(data))
                for p in phases
            ]
            parameters["joint"] = fit_joint(data, *apart).parameters
        return parameters

    def load(self, parameters: Parameters, features: tuple[str, ...]) -> Predictor:
        phases = phases_of(parameters["kind"])
        parts = [
            PhasePart(load_trend(parameters["phases"][p.name], features), p, features)
            for p in phases
            if p.name in parameters["phases"]
        ]
        joint = load_joint(parameters["joint"]) if len(phases) > 1 else None
        return PhasePredictor(parts, joint, features)


def _phase_times(trend: Trend, data: Training, phase: Phase) -> Floats:
    return np.where(present(data, phase), trend.many(data.rows), 0.0)


class PhasePart(Predictor):
    """One phase: 0 where a batch does not have it."""

    def __init__(self, trend: Trend, phase: Phase, features: tuple[str, ...]) -> None:
        self._trend = trend
        self.column = features.index(phase.present) if phase.present is not None else None

    def many(self, rows: Floats) -> Floats:
        return self._trend.many(rows)

    def one(self, row: Sequence[float]) -> float:
        return self._trend.one(row)


class PhasePredictor(Predictor):
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

    def one(self, row: Sequence[float]) -> float:
        if self._joint is None:
            return self._parts[0].one(row)
        us = 0.0
        for part in self._parts:
            assert part.column is not None
            if row[part.column] > 0:
                us = self._joint.one(us, part.one(row), row[self._longest])
        return us
