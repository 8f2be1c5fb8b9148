"""Decode batches whose requests have different lengths, as those being served always do.

Every batch has at most eight different lengths, however many requests, so that its key
stays short, and the same ones on every machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Literal, get_args

from dooly_backend.workload import Batch, Request

#: "one_long": one request beside others that are alike; "ramp": even steps from short to
#: long; "lognormal": many short ones and few long ones, as lengths in traces are; "narrow":
#: the same half as wide, as those are that a server has under way with chats alone.
Shape = Literal["one_long", "ramp", "lognormal", "narrow"]
SHAPES: tuple[Shape, ...] = get_args(Shape)

_LENGTHS = 8  # of one batch, at most
_LONGEST = 4.0  # times the mean, where one request is long
_SIGMA = 0.8  # of the logarithms; the longest of eight is then 2.8 times the mean
_NARROW = 0.4  # likewise: 1.75 times


def uneven_decodes(count: int, mean: int, shape: Shape) -> Batch:
    """`count` decodes of `mean` cached tokens on average. One decode has no shape.

    The mean is exact up to rounding each length.
    """
    shares = _SHAPES[shape](count)
    return Batch(tuple(Request(1, max(1, round(mean * share))) for share in shares))


def _one_long(count: int) -> list[float]:
    if count == 1:
        return [1.0]
    longest = min(_LONGEST, 0.875 * count)
    return [longest] + [(count - longest) / (count - 1)] * (count - 1)


def _ramp(count: int) -> list[float]:
    return _at_quantiles(count, lambda place: 2 * place)


def _lognormal(count: int, sigma: float = _SIGMA) -> list[float]:
    normal = statistics.NormalDist()
    return _at_quantiles(count, lambda place: math.exp(sigma * normal.inv_cdf(place)))


def _narrow(count: int) -> list[float]:
    return _lognormal(count, _NARROW)


def _at_quantiles(count: int, quantile: Callable[[float], float]) -> list[float]:
    """Shares of the mean in as many even steps as there may be lengths, each as often."""
    steps = min(count, _LENGTHS)
    lengths = [quantile((step + 0.5) / steps) for step in range(steps)]
    of_each = [lengths[steps * i // count] for i in range(count)]
    mean = statistics.fmean(of_each)
    return [length / mean for length in of_each]


_SHAPES: dict[Shape, Callable[[int], list[float]]] = {
    "one_long": _one_long,
    "ramp": _ramp,
    "lognormal": _lognormal,
    "narrow": _narrow,
}
