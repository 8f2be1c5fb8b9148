"""How a device's clock gives way under load: three numbers, fitted to steps in a row.

A step that computes much (`HEAVY_TOKENS` new tokens and more) draws more power
than the device may draw for long. Its *heat* h rises towards 1 while it runs such
steps and falls towards 0 otherwise, both with the time constant `tau_s`; a heavy
step takes ``min(1, cool + slope * h)`` of the time that it takes in a long stream
of heavy steps. Light steps, which wait for memory, take what they take. Found on
an H200 (docs/gpu.md); `profiling/clock.py` measures the steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from scipy.optimize import least_squares

from dooly_backend.database.records import ClockStep
from dooly_backend.errors import InputError

#: New tokens from which a step's matrix products draw much power. Decodes of 256 requests
#: are bound by memory yet: with them kept hot they came out 23% too long (docs/gpu.md).
HEAVY_TOKENS = 512
_ROUNDS = 3  # the share changes by a percent or two while a step runs: this converges
_FEWEST = 20  # heavy steps
_STREAM_END = 4  # of a long stream's steps the last so many tell what it settles at
_TAUS_S = np.geomspace(0.01, 2.0, 24)
_UNLIKELY = 0.03  # relative errors above which a step counts for less


@dataclass(frozen=True)
class ClockResponse:
    """The three numbers of a device: `cool` and `slope` are shares, `tau_s` seconds."""

    cool: float
    slope: float
    tau_s: float

    def share(self, heat: float) -> float:
        """Of its time in a long stream, what a heavy step takes at `heat`, 0 to 1."""
        return min(1.0, self.cool + self.slope * heat)

    def took_s(self, heat: float, stream_s: float) -> float:
        """Seconds of a heavy step that begins at `heat` and takes `stream_s` in a stream."""
        took = stream_s * self.share(heat)
        for _ in range(_ROUNDS):
            took = stream_s * self.share(mean_heat(heat, took, self.tau_s))
        return took


def cooled(heat: float, seconds: float, tau_s: float) -> float:
    """The heat after `seconds` of rest or light steps."""
    return heat * math.exp(-seconds / tau_s)


def heated(heat: float, seconds: float, tau_s: float) -> float:
    """The heat after `seconds` of heavy steps."""
    return 1.0 - (1.0 - heat) * math.exp(-seconds / tau_s)


def mean_heat(heat: float, seconds: float, tau_s: float) -> float:
    """The mean heat over `seconds` of heavy steps that begin at `heat`."""
    if seconds <= 0.0:
        return heat
    return 1.0 + (1.0 - heat) * tau_s / seconds * math.expm1(-seconds / tau_s)


@dataclass(frozen=True)
class ClockFit:
    """A response, and how far it is from the steps that it was fitted to (shares)."""

    response: ClockResponse
    mean_error: float
    steps: int


def fit_clock(steps: Sequence[ClockStep]) -> ClockFit:
    """The response that explains `steps`: heavy ones of one size among light ones.

    What a heavy step takes in a long stream is read off the ends of the longest
    streams. Raises InputError where the heavy steps are too few.
    """
    rows = [_Row.of(list(row)) for _, row in groupby(steps, key=lambda step: step.pattern)]
    streams = [row for row in rows if len(row.took_s) and row.is_stream]
    if sum(len(row.took_s) for row in rows) < _FEWEST or not streams:
        raise InputError(
            f"a clock's response needs {_FEWEST} steps of at least {HEAVY_TOKENS} tokens, some "
            "of them in an unbroken stream"
        )
    settled = statistics.median(t for row in streams for t in row.stream_end())
    shares = np.concatenate([row.took_s for row in rows]) / settled
    fits = []
    for tau in _TAUS_S:
        heats = np.array([heat for row in rows for heat in row.heats(float(tau))])

        def residuals(numbers: np.ndarray, heats: np.ndarray = heats) -> np.ndarray:
            cool, slope = numbers
            return np.minimum(1.0, cool + slope * heats) - shares

        found = least_squares(
            residuals,
            [0.9, 0.1],
            bounds=([0.3, 0.0], [1.0, 1.0]),
            loss="soft_l1",
            f_scale=_UNLIKELY,
        )
        fits.append((found.cost, float(tau), found.x, np.abs(residuals(found.x)).mean()))
    _, tau, (cool, slope), error = min(fits, key=lambda fit: fit[0])
    return ClockFit(ClockResponse(float(cool), float(slope), tau), float(error), len(shares))


@dataclass(frozen=True)
class _Row:
    """The heavy steps of one row: when each began and what it took, seconds."""

    begin_s: np.ndarray
    took_s: np.ndarray
    is_stream: bool

    @classmethod
    def of(cls, steps: list[ClockStep]) -> _Row:
        heavy = [step for step in steps if step.tokens >= HEAVY_TOKENS]
        places = [step.place for step in heavy]
        unbroken = sum(b - a == 1 for a, b in pairwise(places))
        return cls(
            np.array([step.begin_us for step in heavy]) / 1e6,
            np.array([step.device_us for step in heavy]) / 1e6,
            unbroken >= 2 * _STREAM_END,
        )

    def stream_end(self) -> np.ndarray:
        """The last steps of the stream; one more may follow it after a rest."""
        gaps = np.diff(self.begin_s) - self.took_s[:-1]
        last = len(self.took_s)
        if gaps[-1] > 2 * self.took_s[-1]:
            last -= 1
        return self.took_s[last - _STREAM_END : last]

    def heats(self, tau_s: float) -> Iterator[float]:
        """The mean heat of each step."""
        heat = since = 0.0
        for begin, took in zip(self.begin_s.tolist(), self.took_s.tolist(), strict=True):
            heat = cooled(heat, max(0.0, begin - since), tau_s)
            yield mean_heat(heat, took, tau_s)
            heat, since = heated(heat, took, tau_s), begin + took
