"""What steps take beyond their operations, as the engine runs them by default.

Fitted to steps in a row (`profiling/stream.py`), by execution mode:

- the device takes ``share * operations + step``: compiled code fuses some
  operations, and kernels of a graph follow each other more closely than they do
  where they are timed. Only steps that the device bounded tell (`bound_by_device`);
- the host launches for ``step + layer * layers + request * requests + token *
  tokens``: without a graph every kernel is a launch of its own;
- the scheduler takes ``step + request * requests`` before a step and after it,
  whatever its mode.

A step of a long stream lasts as long as the slower of device and host. Errors
are relative and outliers damped. The deepest engine, which is the whole model or
nearest to it, decides; shallow ones tell what of a launch grows with the layers.
Each part says how far off it is on batches that it was not fitted to, by leaving
each of its batches out in turn; of several sets of terms the shorter one is kept
unless a longer one is better at that.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from dooly_backend.database.records import HostStep, PartCost, StepMode, StreamStep
from dooly_backend.regression.batches import Floats

Flags = npt.NDArray[np.bool_]
MODES: tuple[StepMode, ...] = ("eager", "piecewise", "full")
_DAMPED = 0.05  # relative errors above which a step counts for less
_EARLY = 1.1  # a step so much longer than its launch was launched early
_ABOUT = 0.9  # of a step: what the device needs at least, where launching waited for it
_SHORTEST = 0.2  # quantile
_ROUNDS = 4
_BETTER = 0.9
_FEWEST = 4  # steps that tell something together


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
        if not chosen:
            continue
        of_mode, sums = zip(*chosen, strict=True)
        bound, waits = bound_by_device(of_mode, sums)
        if bound.any():
            device = [pair for pair, yes in zip(chosen, bound, strict=True) if yes]
            costs.append(_device(mode, *zip(*device, strict=True)))
        # A launch that waited for the device says nothing of launching.
        launched = [step for step, waited in zip(of_mode, waits, strict=True) if not waited]
        if launched:
            costs.append(_launch(mode, launched))
    measured = sorted(hosts, key=lambda host: host.num_reqs)
    if measured:
        counts = [host.num_reqs for host in measured]
        schedule = [statistics.median(host.schedule_us) for host in measured]
        output = [statistics.median(host.output_us) for host in measured]
        costs.append(_by_requests("schedule", counts, schedule))
        costs.append(_by_requests("output", counts, output))
    return tuple(costs)


def bound_by_device(
    steps: Sequence[StreamStep], operations_us: Sequence[float]
) -> tuple[Flags, Flags]:
    """Which steps of one mode the device decided, and in which of these launching waited for it.

    The host that is done early shows it, where several are. But some launches wait
    for the step before: FlashInfer plans with its numbers, and a queue of kernels may
    be full. Where a launch is as long as its step, the step is the device's if that
    needs about as long, as far as the other steps tell. Where none is launched early
    on a GPU, the steps that are shortest beside their operations tell.
    """
    times = np.array([step.median_us for step in steps])
    operations = np.array(operations_us)
    early = times > _EARLY * np.array([step.launch_median_us for step in steps])
    ratios = times / operations
    waits = np.zeros(len(steps), bool)
    on_gpu = any(step.device_us for step in steps)
    if early.sum() >= _FEWEST:
        return early, waits
    if early.any():
        share = float(np.median(ratios[early]))
    elif on_gpu:
        share = float(np.quantile(ratios, _SHORTEST))
    else:
        return early, waits
    for _ in range(_ROUNDS):
        waits = ~early & (share * operations > _ABOUT * times)
        if not (early | waits).any():
            break
        share = float(np.median(ratios[early | waits]))
    return early | waits, waits


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
    deepest = max(step.num_layers for step in steps)
    deep = [pair for pair in zip(steps, operations, strict=True) if pair[0].num_layers == deepest]
    if len(deep) >= _FEWEST:
        steps, operations = zip(*deep, strict=True)
    columns = {"share": list(operations), "step_us": [1.0] * len(steps)}
    times = np.array([step.median_us for step in steps])
    sets = [("share",), ("share", "step_us")] if len(steps) >= _FEWEST else [("share",)]
    return _fitted(mode, "device", columns, sets, times, [step.batch for step in steps])


def _launch(mode: StepMode, steps: Sequence[StreamStep]) -> PartCost:
    columns = {
        "step_us": [1.0] * len(steps),
        "layer_us": [float(step.num_layers) for step in steps],
        "request_us": [float(step.batch.num_reqs) for step in steps],
        "token_us": [float(step.batch.num_tokens) for step in steps],
    }
    base = ("step_us", "layer_us")
    sets = [base, (*base, "request_us"), (*base, "token_us"), (*base, "request_us", "token_us")]
    times = np.array([step.launch_median_us for step in steps])
    weights = np.array(columns["layer_us"]) / max(columns["layer_us"])
    return _fitted(mode, "launch", columns, sets, times, [step.batch for step in steps], weights)


def _by_requests(
    part: Literal["schedule", "output"], counts: Sequence[int], times: Sequence[float]
) -> PartCost:
    columns = {"step_us": [1.0] * len(counts), "request_us": [float(count) for count in counts]}
    return _fitted("any", part, columns, [("step_us", "request_us")], np.array(times), counts)


def _fitted(
    mode: StepMode | Literal["any"],
    part: Literal["device", "launch", "schedule", "output"],
    columns: Mapping[str, Sequence[float]],
    sets: Sequence[tuple[str, ...]],
    times: Floats,
    groups: Sequence[Any],
    weights: Floats | None = None,
) -> PartCost:
    """The first of `sets` of columns, or a later one that errs less by a tenth.

    Errors are those of the heaviest.
    """
    best: PartCost | None = None
    if weights is None:
        weights = np.ones(len(times))
    for names in sets:
        factors = np.column_stack([columns[name] for name in names])
        found: dict[str, Any] = dict(
            zip(names, map(float, _robust(factors, times, weights)), strict=True)
        )
        errors = _left_out(factors, times, groups, weights)
        if len(errors):
            found |= {"mape": float(errors.mean()), "worst": float(errors.max())}
        cost = PartCost(mode, part, steps=len(times), **found)
        if best is None or cost.mape < _BETTER * best.mape:
            best = cost
    assert best is not None
    return best


def _robust(factors: Floats, times: Floats, weights: Floats) -> Floats:
    """Coefficients, none negative, of the least damped relative errors.

    A factor that does not vary beside the constant one is left at 0.
    """
    told = _told(factors)
    relative = factors[:, told] / times[:, None]
    size = 1 / np.maximum(relative.max(axis=0), np.finfo(float).tiny)  # all factors alike

    def residuals(scaled: Floats) -> Floats:
        return weights * ((relative * size) @ scaled - 1)

    start, *_ = np.linalg.lstsq(weights[:, None] * relative * size, weights, rcond=None)
    found = least_squares(
        residuals, np.maximum(start, 1e-9), bounds=(0.0, np.inf), loss="soft_l1", f_scale=_DAMPED
    )
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


def _left_out(factors: Floats, times: Floats, groups: Sequence[Any], weights: Floats) -> Floats:
    """Percent: each batch predicted by a fit to the others, where it weighs most."""
    errors = []
    for group in dict.fromkeys(groups):
        inside = np.array([other == group for other in groups])
        if inside.all():
            continue
        coefficients = _robust(factors[~inside], times[~inside], weights[~inside])
        shown = inside & (weights == weights.max())
        errors += list(np.abs(factors[shown] @ coefficients / times[shown] - 1) * 100)
    return np.array(errors)
