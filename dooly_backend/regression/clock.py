"""How a device's clock gives way under load: four numbers, fitted to steps in a row.

A step that computes much (`HEAVY_TOKENS` new tokens and more) draws more power
than the device may draw for long, and the clock falls. The device's *heat* h
follows what runs, with the time constant `tau_s`: towards 1 during a heavy step,
towards ``tokens / warm_tokens`` (1 at most) during a light one, towards 0 while
it idles. A heavy step takes ``min(1, cool + slope * h)`` of the time that it takes
in a long stream of heavy steps. A light step, which mostly waits for memory, takes
``1 + (light + light_token * tokens) * h`` times what it takes on a rested device.
Found on an H200 (docs/gpu.md); `profiling/clock.py` measures the steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from dooly_backend.database.records import ClockStep
from dooly_backend.errors import InputError

#: New tokens from which a step's matrix products draw much power. Decodes of 256 requests
#: are bound by memory yet: with them kept hot they came out 23% too long (docs/gpu.md).
HEAVY_TOKENS = 512
_ROUNDS = 3  # the share changes by a few percent while a step runs: this converges
_FEWEST = 20  # heavy steps
_SETTLING, _STREAM = 4, 8  # steps: of a stream of so many, those after the first few tell
_TAUS_S = np.geomspace(0.005, 1.0, 28)
#: Light steps never warm the device; finite, since bundles hold no other numbers.
NEVER_WARM = 1e9
_WARM_TOKENS = (*np.geomspace(32, 2048, 13), NEVER_WARM)
_IDLE_US = 100.0  # a device that waited longer for a step has waited for its inputs, too
_COARSE = 3  # places of a first search
_HOT = 0.3  # light steps that were never behind a heavy one tell nothing
_UNLIKELY = 0.03  # relative errors above which a step counts for less


@dataclass(frozen=True)
class ClockResponse:
    """The numbers of a device: `cool`, `slope` and `light` are shares, `tau_s` seconds."""

    cool: float
    slope: float
    tau_s: float
    warm_tokens: float = NEVER_WARM
    light: float = 0.0
    light_token: float = 0.0

    def light_share(self, heat: float, tokens: float) -> float:
        """Of its time on a rested device, what a light step of `tokens` takes at `heat`."""
        return 1.0 + (self.light + self.light_token * tokens) * heat

    def share(self, heat: float) -> float:
        """Of its time in a long stream, what a heavy step takes at `heat`, 0 to 1."""
        return min(1.0, self.cool + self.slope * heat)

    def target(self, tokens: int) -> float:
        """The heat that many steps of `tokens` new tokens lead to."""
        return 1.0 if tokens >= HEAVY_TOKENS else min(1.0, tokens / self.warm_tokens)

    def after(self, heat: float, seconds: float, target: float = 0.0) -> float:
        """The heat after `seconds` of what leads to `target`; nothing leads to 0."""
        return target + (heat - target) * math.exp(-seconds / self.tau_s)

    def mean(self, heat: float, seconds: float, target: float = 1.0) -> float:
        """The mean heat over `seconds` of what leads to `target` and begins at `heat`."""
        if seconds <= 0.0:
            return heat
        share = -self.tau_s / seconds * math.expm1(-seconds / self.tau_s)
        return target + (heat - target) * share

    def took_s(self, heat: float, steady_s: float, tokens: float = HEAVY_TOKENS) -> float:
        """Seconds of a step that begins at `heat`.

        `steady_s` is what it takes in a stream, if it is heavy, and on a rested device if it
        is light.
        """
        if tokens >= HEAVY_TOKENS:
            took = steady_s * self.share(heat)
            for _ in range(_ROUNDS):
                took = steady_s * self.share(self.mean(heat, took))
            return took
        return steady_s * self.light_share(
            self.mean(heat, steady_s, self.target(round(tokens))), tokens
        )


@dataclass(frozen=True)
class ClockFit:
    """A response, and how far it is from the steps that it was fitted to (shares)."""

    response: ClockResponse
    mean_error: float
    steps: int


def fit_clock(steps: Sequence[ClockStep]) -> ClockFit:
    """The response that explains `steps`: heavy ones of about one size among light ones.

    What a heavy step takes in a long stream is the median of the later steps of
    the streams, for steps of one size each. Steps much shorter than the time constant
    tell it apart from the shares. Raises InputError where heavy steps or
    streams of them are too few.
    """
    rows, stream_us = _rows(steps)
    shares = np.array([s for row in rows for s in row.shares(stream_us)])
    if len(shares) < _FEWEST:
        raise InputError(
            f"a clock's response needs {_FEWEST} steps of at least {HEAVY_TOKENS} tokens, of "
            "sizes that also run in an unbroken stream"
        )
    fits: dict[tuple[int, int], tuple[float, float, float, float, ClockResponse]] = {}

    def fit(tau: int, warm: int) -> float:
        response = ClockResponse(1.0, 0.0, float(_TAUS_S[tau]), float(_WARM_TOKENS[warm]))
        heats = np.array([h for row in rows for h in row.heats(response, stream_us)])
        fits[tau, warm] = (*_linear(heats, shares), response)
        return fits[tau, warm][0]

    # The error is smooth in both: every third place, then all around the best one.
    taus, warms = range(len(_TAUS_S)), range(len(_WARM_TOKENS))
    near = min(product(taus[::_COARSE], warms[::_COARSE]), key=lambda place: fit(*place))
    for place in product(taus, warms):
        if max(abs(a - b) for a, b in zip(place, near, strict=True)) < _COARSE:
            fit(*place)
    _, cool, slope, error, found = min(fits.values(), key=lambda each: each[0])
    response = ClockResponse(cool, slope, found.tau_s, found.warm_tokens)
    light, light_token = _of_light_steps(rows, response)
    response = replace(response, light=light, light_token=light_token)
    return ClockFit(response, error, len(shares))


def _of_light_steps(rows: Sequence[_Row], response: ClockResponse) -> tuple[float, float]:
    """How much longer light steps take at a heat of 1: a share, and one for each token.

    What a light step takes on a rested device is found for each size beside it.
    """
    steps = [step for row in rows for step in row.light(response)]
    sizes = sorted({size for size, _, _ in steps})
    if len(steps) < _FEWEST or not any(heat > _HOT for _, heat, _ in steps):
        return 0.0, 0.0
    place = np.array([sizes.index(size) for size, _, _ in steps])
    tokens = np.array([size[2] for size, _, _ in steps], float)
    heats = np.array([heat for _, heat, _ in steps])
    took = np.log([us for _, _, us in steps])
    rested = [float(np.median(took[place == number])) for number in range(len(sizes))]
    most = tokens.max()

    def residuals(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        longer = (numbers[0] + numbers[1] * tokens / most) * heats
        return numbers[2:][place] + np.log1p(longer) - took

    low = [0.0, 0.0, *[-np.inf] * len(sizes)]
    found = least_squares(
        residuals,
        [0.01, 0.01, *rested],
        bounds=(low, np.inf),
        loss="soft_l1",
        f_scale=_UNLIKELY,
    )
    return float(found.x[0]), float(found.x[1] / most)


def explained(
    steps: Sequence[ClockStep], response: ClockResponse
) -> Iterator[tuple[int, str, float, float]]:
    """Every heavy step: layers, pattern, its share of what it takes in a stream, and `response`'s.

    Steps of sizes that no stream has are left out.
    """
    rows, stream_us = _rows(steps)
    for row in rows:
        heats = row.heats(response, stream_us)
        for share, heat in zip(row.shares(stream_us), heats, strict=True):
            yield row.num_layers, row.pattern, share, response.share(heat)


def _rows(steps: Sequence[ClockStep]) -> tuple[list[_Row], dict[_Size, float]]:
    """The steps by pattern, and what heavy ones of each size take in a stream."""
    rows = [_Row(list(row)) for _, row in groupby(steps, key=_row_of)]
    settled: dict[_Size, list[float]] = {}
    for row in rows:
        for step in row.stream_end():
            settled.setdefault(_size(step), []).append(step.device_us)
    return rows, {size: statistics.median(us) for size, us in settled.items()}


def _linear(
    heats: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]
) -> tuple[float, float, float, float]:
    """The cost, `cool`, `slope` and mean error of the best line, which is level above 1."""

    def residuals(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.minimum(1.0, numbers[0] + numbers[1] * heats) - shares

    found = least_squares(
        residuals, [0.9, 0.1], bounds=([0.3, 0.0], [1.0, 1.0]), loss="soft_l1", f_scale=_UNLIKELY
    )
    error = float(np.abs(residuals(found.x)).mean())
    return float(found.cost), float(found.x[0]), float(found.x[1]), error


_Size = tuple[int, str, int]  # layers, what its batches are, new tokens


def _size(step: ClockStep) -> _Size:
    """Steps of one size take the same at the same clock."""
    return step.num_layers, step.pattern.partition(", ")[0], step.tokens


def _row_of(step: ClockStep) -> tuple[int, str]:
    return step.num_layers, step.pattern


class _Row:
    """The steps of one row, in order."""

    def __init__(self, steps: list[ClockStep]) -> None:
        self._steps = steps
        self.num_layers, self.pattern = _row_of(steps[0])

    def stream_end(self) -> Iterator[ClockStep]:
        """What follows the first steps of every unbroken stream of heavy ones that is long."""
        for (_, _, tokens), stream in groupby(self._steps, key=_size):
            same = list(stream)
            if tokens >= HEAVY_TOKENS and len(same) >= _STREAM:
                yield from same[_SETTLING:]

    def shares(self, stream_us: Mapping[_Size, float]) -> Iterator[float]:
        """Of what each heavy step takes in a stream, what it took."""
        for idle_us, step in self._steps_and_idle():
            if self._tells(idle_us, step, stream_us):
                yield step.device_us / stream_us[_size(step)]

    def heats(self, response: ClockResponse, stream_us: Mapping[_Size, float]) -> Iterator[float]:
        """The mean heat of each of them."""
        heat = 0.0
        for idle_us, step in self._steps_and_idle():
            heat = response.after(heat, idle_us / 1e6)
            took = step.device_us / 1e6
            if self._tells(idle_us, step, stream_us):
                yield response.mean(heat, took)
            heat = response.after(heat, took, response.target(step.tokens))

    def light(self, response: ClockResponse) -> Iterator[tuple[_Size, float, float]]:
        """Of each light step its size, mean heat and microseconds, where it is told."""
        heat = 0.0
        for idle_us, step in self._steps_and_idle():
            heat = response.after(heat, idle_us / 1e6)
            took, target = step.device_us / 1e6, response.target(step.tokens)
            if step.tokens < HEAVY_TOKENS and idle_us < _IDLE_US:
                yield _size(step), response.mean(heat, took, target), step.device_us
            heat = response.after(heat, took, target)

    def _steps_and_idle(self) -> Iterator[tuple[float, ClockStep]]:
        """Every step, and how long the device idled before it."""
        end = self._steps[0].begin_us
        for step in self._steps:
            yield max(0.0, step.begin_us - end), step
            end = step.begin_us + step.device_us

    @staticmethod
    def _tells(idle_us: float, step: ClockStep, stream_us: Mapping[_Size, float]) -> bool:
        """Whether a step tells of the clock: it is heavy, and none of its time was the host's."""
        return idle_us < _IDLE_US and _size(step) in stream_us
