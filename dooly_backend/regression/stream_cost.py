"""What steps take beyond their operations, as the engine runs them by default.

Fitted to steps in a row (`profiling/stream.py`), by execution mode:

- the device takes ``share * operations + step``: compiled code fuses some
  operations, and kernels of a graph follow each other more closely than they do
  where they are timed. Only steps that the device bounded tell;
- the host launches for ``step + layer * layers + request * requests + token *
  tokens``: without a graph every kernel is a launch of its own;
- the scheduler takes ``step + request * requests`` before a step and after it,
  whatever its mode.

A step of a long stream lasts as long as the slower of device and host. Errors
are relative and outliers damped. Each part says how far off it is on batches
that it was not fitted to, by leaving each of its batches out in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from scipy.optimize import least_squares

from dooly_backend.database.records import HostStep, PartCost, StepMode, StreamStep
from dooly_backend.regression.batches import Floats

MODES: tuple[StepMode, ...] = ("eager", "piecewise", "full")
_DAMPED = 0.05  # relative errors above which a step counts for less
_BOUND = 1.1  # a step so much longer than its launch is the device's
_FEWEST = 4  # steps from which a share and what comes once a step can be told apart


def fit_stream_cost(
    steps: Sequence[StreamStep], operations_us: Sequence[float], hosts: Iterable[HostStep] = ()
) -> tuple[PartCost, ...]:
    """The parts of a step by mode; a mode or part without measurements is missing.

    `operations_us` are the sums of the operations of each of `steps`, at its
    depth and padding, from the predictor that the cost is used with.
    """
    costs: list[PartCost] = []
    for mode in MODES:
        chosen = [
            (step, us) for step, us in zip(steps, operations_us, strict=True) if step.mode == mode
        ]
        device = [(step, us) for step, us in chosen if is_device_bound(step)]
        if device:
            costs.append(_device(mode, *zip(*device, strict=True)))
        if chosen:
            costs.append(_launch(mode, [step for step, _ in chosen]))
    measured = sorted(hosts, key=lambda host: host.num_reqs)
    if measured:
        counts = [host.num_reqs for host in measured]
        schedule = [statistics.median(host.schedule_us) for host in measured]
        output = [statistics.median(host.output_us) for host in measured]
        costs.append(_by_requests("schedule", counts, schedule))
        costs.append(_by_requests("output", counts, output))
    return tuple(costs)


def is_device_bound(step: StreamStep) -> bool:
    """Whether the device, and not the host that launches, decided how long the step took."""
    return step.median_us > _BOUND * step.launch_median_us


def time_us(
    cost: PartCost,
    operations_us: float = 0.0,
    layers: int = 0,
    requests: int = 0,
    tokens: int = 0,
) -> float:
    """What a part of one step takes."""
    return (
        cost.share * operations_us
        + cost.step_us
        + cost.layer_us * layers
        + cost.request_us * requests
        + cost.token_us * tokens
    )


def _device(mode: StepMode, steps: Sequence[StreamStep], operations: Sequence[float]) -> PartCost:
    names = ("share", "step_us") if len(steps) >= _FEWEST else ("share",)
    factors = np.array([(us, 1.0)[: len(names)] for us in operations])
    times = np.array([step.median_us for step in steps])
    return _fitted(mode, "device", names, factors, times, [step.batch for step in steps])


def _launch(mode: StepMode, steps: Sequence[StreamStep]) -> PartCost:
    names = ("step_us", "layer_us", "request_us", "token_us")
    factors = np.array(
        [(1.0, step.num_layers, step.batch.num_reqs, step.batch.num_tokens) for step in steps]
    )
    times = np.array([step.launch_median_us for step in steps])
    return _fitted(mode, "launch", names, factors, times, [step.batch for step in steps])


def _by_requests(
    part: Literal["schedule", "output"], counts: Sequence[int], times: Sequence[float]
) -> PartCost:
    factors = np.array([(1.0, count) for count in counts])
    names = ("step_us", "request_us")
    return _fitted("any", part, names, factors, np.array(times), counts)


def _fitted(
    mode: StepMode | Literal["any"],
    part: Literal["device", "launch", "schedule", "output"],
    names: Sequence[str],
    factors: Floats,
    times: Floats,
    groups: Sequence[Any],
) -> PartCost:
    found: dict[str, Any] = dict(zip(names, map(float, _robust(factors, times)), strict=True))
    cost = PartCost(mode, part, steps=len(times), **found)
    errors = _left_out(factors, times, groups)
    if len(errors):
        cost = replace(cost, mape=float(errors.mean()), worst=float(errors.max()))
    return cost


def _robust(factors: Floats, times: Floats) -> Floats:
    """Coefficients, none negative, of the least damped relative errors.

    A factor that does not vary beside the constant one is left at 0.
    """
    told = _told(factors)
    relative = factors[:, told] / times[:, None]
    size = 1 / np.maximum(relative.max(axis=0), np.finfo(float).tiny)  # all factors alike

    def residuals(scaled: Floats) -> Floats:
        return (relative * size) @ scaled - 1

    start = np.clip(
        np.linalg.lstsq(relative * size, np.ones(len(times)), rcond=None)[0], 1e-9, None
    )
    bounds = (0.0, np.inf)
    found = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=_DAMPED)
    coefficients = np.zeros(factors.shape[1])
    coefficients[told] = found.x * size
    return coefficients


def _told(factors: Floats) -> list[int]:
    """The columns that can be told apart: one constant at most, and those that vary."""
    chosen: list[int] = []
    constant = False
    for column in range(factors.shape[1]):
        if np.ptp(factors[:, column]) > 0:
            chosen.append(column)
        elif not constant:
            chosen.append(column)
            constant = True
    return chosen


def _left_out(factors: Floats, times: Floats, groups: Sequence[Any]) -> Floats:
    """Percent: each batch, at all its depths, predicted by a fit to the others."""
    errors = []
    for group in dict.fromkeys(groups):
        inside = np.array([other == group for other in groups])
        if inside.all():
            continue
        coefficients = _robust(factors[~inside], times[~inside])
        predicted = factors[inside] @ coefficients
        errors += list(np.abs(predicted / times[inside] - 1) * 100)
    return np.array(errors)
