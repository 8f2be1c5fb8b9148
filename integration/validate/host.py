"""A profile's step times on a host as slow as that of live runs: what of an error is the host's.

Launching a step without a whole graph takes a shared host up to twice as long in one minute as
in another (docs/gpu.md), so that a profile of one minute cannot tell the next one's. Here the
launches of such steps are lengthened, by one factor for each execution mode, until their
mean is that of the runs; all else stays the profile's. What error is left is not the
host's. This is no prediction: the runs that it is compared with are those that were looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from dooly_backend.simulation.columns import Steps
from dooly_backend.simulation.execution import Mode
from dooly_backend.simulation.own_cost import Affine, StreamedCost
from dooly_backend.simulation.records import Run
from dooly_backend.simulation.replay import batches
from dooly_backend.simulation.step_time import StepModel

FEWEST = 10  # steps that tell a mode's factor


def with_host_of(runs: Iterable[Run], model: StepModel) -> StepModel | None:
    """The step times of `model` with launches as long as those of the live `runs`.

    None where the model knows no launches, or the runs have too few to tell.
    """
    cost = model.cost
    if not isinstance(cost, StreamedCost):
        return None
    factors = _factors(runs, model)
    if not factors:
        return None
    modes = dict(cost.modes)
    for mode, factor in factors.items():
        known = modes[mode]
        modes[mode] = replace(
            known, host=_times(known.host, factor), launch=_times(known.launch, factor)
        )
    return model.with_cost(replace(cost, modes=modes))


def _factors(runs: Iterable[Run], model: StepModel) -> dict[Mode, float]:
    """By mode, how much longer its launches took than predicted; whole graphs tell nothing.

    Only steps behind decodes count: a backend that waits for the device while it launches waits
    for all of a prefill. Graphs are launched in less time than the device takes for them, which
    such a backend waits for, too.
    """
    lives: dict[Mode, list[float]] = {}
    expected: dict[Mode, list[float]] = {}
    for run in runs:
        columns, many = Steps.of(run.steps), batches(run)
        shapes, times = model.shapes(many), model.times(many)
        live_us = (columns.launched_s - columns.start_s) * 1e6
        assert times.launch_us is not None
        predicted_us = times.host_us + times.launch_us
        decodes = shapes.tokens == shapes.requests
        behind = np.append(False, decodes[:-1]) & np.isfinite(live_us)
        for mode in (Mode.PIECEWISE, Mode.EAGER):
            chosen = behind & (shapes.mode == mode)
            lives.setdefault(mode, []).extend(live_us[chosen])
            expected.setdefault(mode, []).extend(predicted_us[chosen])
    return {
        mode: float(np.mean(lives[mode]) / np.mean(expected[mode]))
        for mode in lives
        if len(lives[mode]) >= FEWEST
    }


def _times(part: Affine, factor: float) -> Affine:
    curve = tuple((tokens, us * factor) for tokens, us in part.curve)
    return Affine(part.step_us * factor, part.request_us * factor, part.token_us * factor, curve)
