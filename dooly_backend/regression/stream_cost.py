"""What steps take beyond their operations, as the engine runs them by default.

Fitted to steps in a row (`profiling/stream.py`), by execution mode:

- the device takes attention and ``share * (other operations) + step``: compiled code fuses
  some operations, and kernels of a graph follow each other more closely than they do
  where they are timed; nothing is fused with attention, which is most of a step with
  long contexts;
- the host launches for ``step + layer * layers + request * requests``: without a
  graph every kernel is a launch of its own. What a request takes is that of whole
  graphs, where steps of many requests tell it best;
- on an idle device ``step + layer * layers + request * requests`` of that pass before it
  begins: what lone steps (`alone_us`) take longer than those in a row;
- the scheduler takes ``step + request * requests`` before a step and after it,
  whatever its mode.

Where a backend waits for the device while it launches, no launch ends early. Then the last
step of a row tells: nothing is launched behind it, so that its tokens are out as much earlier
as its launch lasted after the device had begun.

A step of a long stream lasts as long as the slower of device and host. Errors
are relative and outliers damped. Each part says how far off it is on batches
that it was not fitted to, by leaving each of its batches out in turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.optimize import least_squares

from dooly_backend.database.records import HostStep, Part, PartCost, StepMode, StreamStep
from dooly_backend.regression.batches import Floats
from dooly_backend.regression.clock import HEAVY_TOKENS
from dooly_backend.regression.step_operations import Operations
from dooly_backend.workload import Batch

MODES: tuple[StepMode, ...] = ("full", "piecewise", "eager")
_DAMPED = 0.05  # relative errors above which a step counts for less
_FREELY = 0.9  # of a step: a launch that took no more did not wait for the device
_LEAST_US = 1.0  # what is shorter, a clock of the host does not tell
_IDLE = 0.7  # of a step: with no more operations than that the device waited for the launch
ROW = 12  # steps that are launched behind each other (`profiling.stream`)
_CLEARLY = 0.9  # of an error: what one number more must reach to be believed
_NONE = Operations(0.0)


def fit_stream_cost(
    steps: Sequence[StreamStep], operations: Sequence[Operations], hosts: Iterable[HostStep] = ()
) -> tuple[PartCost, ...]:
    """The parts of a step by mode; a mode or part without measurements is missing.

    `operations` are the sums of the operations of each of `steps`, at its
    depth and padding, from the predictor that the cost is used with.
    """
    costs: list[PartCost] = []
    request_us: float | None = None
    for mode in MODES:
        chosen = [
            _Step.of(step, sums)
            for step, sums in zip(steps, operations, strict=True)
            if step.mode == mode
        ]
        if chosen:
            found = _of_mode(mode, chosen, request_us)
            request_us = found[-1].request_us if request_us is None else request_us
            if len(found) > 1:  # the device decided some
                device, launch = found
                rest = _rest_of_waiting(launch, chosen)
                if rest is not None:
                    launch = replace(launch, step_us=rest, layer_us=0.0, request_us=0.0)
                before = _before(mode, chosen, device, launch)
                if rest is not None:
                    # Heavy steps tell nothing of what is before: whole graphs do.
                    ahead = before or next((c for c in costs if c.part == "before"), None)
                    step_us = rest + (0.0 if ahead is None else ahead.step_us)
                    launch = replace(launch, step_us=step_us)
                found = [device, launch, *([] if before is None else [before])]
            costs += found
    measured = sorted(hosts, key=lambda host: host.num_reqs)
    if measured:
        counts = [host.num_reqs for host in measured]
        schedule = [statistics.median(host.schedule_us) for host in measured]
        output = [statistics.median(host.output_us) for host in measured]
        costs.append(_by_requests("schedule", counts, schedule))
        costs.append(_by_requests("output", counts, output))
    return tuple(costs)


def time_us(
    cost: PartCost,
    operations: Operations = _NONE,
    layers: int = 0,
    requests: int = 0,
    tokens: int = 0,
) -> float:
    """What a part of one step takes; of attention the device takes all."""
    attention_us = operations.attention_us if cost.part == "device" else 0.0
    return (
        attention_us
        + cost.share * (operations.us - attention_us)
        + cost.step_us
        + cost.layer_us * layers
        + cost.request_us * requests
        + cost.token_us * tokens
    )


@dataclass(frozen=True)
class _Step:
    """What is known of a step: its numbers, and medians in microseconds."""

    batch: Batch
    layers: int
    operations: Operations
    interval_us: float
    launch_us: float
    on_gpu: bool
    alone_us: float | None
    last_us: float  # the interval behind which nothing was launched

    @classmethod
    def of(cls, step: StreamStep, operations: Operations) -> _Step:
        return cls(
            step.batch,
            step.num_layers,
            operations,
            step.median_us,
            step.launch_median_us,
            bool(step.device_us),
            statistics.median(step.alone_us) if step.alone_us else None,
            statistics.median(step.interval_us[ROW - 1 :: ROW] or step.interval_us[-1:]),
        )

    @property
    def ended_early(self) -> bool:
        """Whether the host was done with launching well before the device was with the step."""
        return self.launch_us < _FREELY * self.interval_us

    @property
    def tells_its_launch(self) -> bool:
        """Whether the launch did not wait for the device, as some backends do meanwhile."""
        return self.ended_early or self.operations.us < _IDLE * self.interval_us


_DEVICE, _LAUNCH = ("share", "step_us"), ("step_us", "layer_us", "request_us")
_FIRST_SHARE = 0.95
_MOST_SHARE = 1.15  # what is beyond is no operation's


def _of_mode(mode: StepMode, steps: Sequence[_Step], request_us: float | None) -> list[PartCost]:
    """Device and launch together: a step in a row lasts as long as the slower of the two.

    Some backends wait for the device while they launch, so that the launch cannot be
    read off its own time; where it ended early, it can. What the device takes once
    a step is looked for only where batches left out are then predicted clearly better: a
    dozen steps tell it and the share apart by chance, too. The launch's part comes last.
    """
    deepest = max(step.layers for step in steps)
    fits = []
    for once in (False, True):
        numbers = _joint(steps, once, request_us)
        errors: dict[_Step, float] = {}
        for batch in dict.fromkeys(step.batch for step in steps):
            others = [step for step in steps if step.batch != batch]
            if others:
                left_out = _joint(others, once, request_us)
                errors |= {s: _relative(left_out, s) for s in steps if s.batch == batch}
        # Few layers show what launching takes, and how noisy the host is: many are what is run.
        judged = [abs(error) for step, error in errors.items() if step.layers == deepest]
        fits.append((statistics.fmean(judged) if judged else 0.0, numbers, errors))
    without, with_it = fits
    _, numbers, errors = with_it if with_it[0] < _CLEARLY * without[0] else without
    of_deepest = [s for s in steps if s.layers == deepest]
    device = [s for s in of_deepest if _device_us(numbers, s) >= _launch_us(numbers, s)]
    if not any(step.on_gpu or step.ended_early for step in steps):
        device = []  # a CPU, on which launching is computing
    launch = [s for s in steps if s.tells_its_launch]
    parts = [_part(mode, "launch", dict(zip(_LAUNCH, numbers[2:], strict=True)), launch, errors)]
    if device:
        found = dict(zip(_DEVICE, numbers[:2], strict=True))
        parts.insert(0, _part(mode, "device", found, device, errors))
    return parts


def _part(
    mode: StepMode,
    part: Literal["device", "launch"],
    numbers: Mapping[str, float],
    steps: Sequence[_Step],
    errors: Mapping[_Step, float],
) -> PartCost:
    known = [100 * abs(errors[step]) for step in steps if step in errors]
    cost = PartCost(mode, part, steps=len(steps), **{n: float(v) for n, v in numbers.items()})
    return replace(cost, mape=statistics.fmean(known), worst=max(known)) if known else cost


def _device_us(numbers: Floats, step: _Step) -> float:
    attention_us = step.operations.attention_us
    return float(attention_us + numbers[0] * (step.operations.us - attention_us) + numbers[1])


def _launch_us(numbers: Floats, step: _Step) -> float:
    factors = (1.0, step.layers, step.batch.num_reqs)
    return float(np.dot(numbers[2:], factors))


def _relative(numbers: Floats, step: _Step) -> float:
    """By what share of the step the numbers are off."""
    return max(_device_us(numbers, step), _launch_us(numbers, step)) / step.interval_us - 1


def _joint(steps: Sequence[_Step], once: bool, request_us: float | None) -> Floats:
    """Share, what the device takes `once` a step, and the launch's three numbers; none negative.

    The least damped relative errors of the deepest engine's steps, which are those that
    are run, and of the launches that are known. What a request takes is the same in all
    modes: where it is known, it is not looked for.
    """
    deepest = max(step.layers for step in steps)
    whole = [step for step in steps if step.layers == deepest]
    launches = [step for step in steps if step.tells_its_launch]
    launched = statistics.median(step.launch_us for step in steps)
    known = np.array([0.0, 0.0, 0.0, 0.0, request_us or 0.0])
    scale = np.array([1.0, launched, launched, launched / deepest, launched / 100])
    start = np.array([_FIRST_SHARE, 1e-6, 0.5, 0.5, 1e-6])
    varies = np.array(
        [
            True,
            once,
            True,
            len({step.layers for step in steps}) > 1,
            request_us is None and len({step.batch.num_reqs for step in steps}) > 1,
        ]
    )

    def spread(few: Floats) -> Floats:
        numbers = known.copy()
        numbers[varies] = few * scale[varies]
        return numbers

    def residuals(few: Floats) -> Floats:
        numbers = spread(few)
        of_steps = [_relative(numbers, step) for step in whole]
        of_launches = [_launch_us(numbers, step) / step.launch_us - 1 for step in launches]
        return np.array([*of_steps, *of_launches])

    most = np.array([_MOST_SHARE, *[np.inf] * 4])[varies]
    found = least_squares(
        residuals, start[varies], bounds=(0.0, most), loss="soft_l1", f_scale=_DAMPED
    )
    return spread(found.x)


def _rest_of_waiting(launch: PartCost, steps: Sequence[_Step]) -> float | None:
    """What of a launch that waits for the device follows its first kernel; None for another."""
    if launch.steps:
        return None
    deepest = max(step.layers for step in steps)
    rests = [step.interval_us - step.last_us for step in steps if step.layers == deepest]
    return max(statistics.median(rests), 0.0)


def _before(
    mode: StepMode, steps: Sequence[_Step], device: PartCost, launch: PartCost
) -> PartCost | None:
    """What a step that was waited for took longer than one in a row, where the device decided both.

    Where the launch decided, a lone step is out when its launch is, which tells nothing of
    what was before; and heavy steps alone run at another clock. None where no step tells.
    """
    telling = [
        step
        for step in steps
        if step.alone_us is not None
        and step.batch.num_tokens < HEAVY_TOKENS
        and time_us(device, step.operations)
        >= time_us(launch, layers=step.layers, requests=step.batch.num_reqs)
    ]
    if not telling:
        return None
    lone = np.array([step.alone_us for step in telling], float)
    # Those in a row as they were measured, so that no error of the operations is in it.
    waits = np.maximum(lone - [step.interval_us for step in telling], 0.0)
    factors = np.array([(1.0, step.layers, step.batch.num_reqs) for step in telling])
    numbers = dict(zip(_LAUNCH, map(float, _waited(factors, waits)), strict=True))
    cost = PartCost(mode, "before", steps=len(telling), **numbers)
    errors = []
    for batch in dict.fromkeys(step.batch for step in telling):
        inside = np.array([step.batch == batch for step in telling])
        if not inside.all():
            left_out = _waited(factors[~inside], waits[~inside])
            errors += list(abs(factors[inside] @ left_out - waits[inside]) / lone[inside] * 100)
    return replace(cost, mape=statistics.fmean(errors), worst=max(errors)) if errors else cost


def _waited(factors: Floats, waits: Floats) -> Floats:
    """Coefficients, none negative, of the least damped errors.

    All steps of an engine wait about equally long: errors relative to waits of almost
    nothing would decide everything.
    """
    told = _told(factors)
    size = 1 / np.maximum(factors[:, told].max(axis=0), np.finfo(float).tiny)
    usual = max(float(np.median(waits)), _LEAST_US)

    def residuals(scaled: Floats) -> Floats:
        return (factors[:, told] * size) @ scaled - waits / usual

    start = np.full(len(told), 1 / len(told))
    found = least_squares(residuals, start, bounds=(0.0, np.inf), loss="soft_l1", f_scale=_DAMPED)
    coefficients = np.zeros(factors.shape[1])
    coefficients[told] = found.x * size * usual
    return coefficients


def _by_requests(
    part: Literal["schedule", "output"], counts: Sequence[int], times: Sequence[float]
) -> PartCost:
    factors = np.array([(1.0, count) for count in counts])
    names = ("step_us", "request_us")
    return _fitted("any", part, names, factors, np.array(times), counts)


def _fitted(
    mode: StepMode | Literal["any"],
    part: Part,
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
