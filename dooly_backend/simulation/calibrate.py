"""The host's part of a step, fitted to a live run of the same configuration.

A profile of a GPU holds what its kernels take. What is left of a step is told
by when each live step was scheduled, launched, ready and noted
(`StepRecord`). Latencies of requests are not looked at.

- Before and during the launch: `launched - start`. A step that replays a whole
  graph is launched at once; what other steps need longer is launching, beside
  which the device works already.
- After the result: `end - ready`.
- Gaps between kernels and kernels outside the model: where the device was the
  slower one, the distance of two results less the operations.

Without asynchronous scheduling the parts of a step follow one another, and on a
CPU they cannot be told apart: there the whole step less its operations is
fitted, in requests and tokens. It may be negative: code that never leaves the
cache in a step costs an operation less than it did when it was timed alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares, nnls

from dooly_backend.errors import InputError
from dooly_backend.simulation.columns import Steps
from dooly_backend.simulation.execution import Mode
from dooly_backend.simulation.own_cost import Affine, HostCost
from dooly_backend.simulation.records import Numbers, Run
from dooly_backend.simulation.replay import batches
from dooly_backend.simulation.step_time import StepModel

FEWEST_STEPS = 20
# Tokens. Close together below 64: a CPU's kernels change between batches of two, four and eight.
PLACES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
_FEWEST_THERE = 5  # steps beyond the place before
_DAMPED = 0.1  # relative errors above which a step counts for less
# Fetching a result that is there takes 20 to 150 us on an H200's host: one that waited longer
# has seen the result when it came.
_WAITED_US = 300.0


def calibrated(live: Iterable[Run], model: StepModel, places: Sequence[int] = PLACES) -> HostCost:
    """What the steps of `live` took beyond the operations that `model` knows.

    `places` are tokens at which the curve of a CPU's step cost has its points.
    Raises InputError where the runs have too few steps, or do not tell when
    steps were launched.
    """
    live = list(live)
    tables = [_table(run, model) for run in live]
    steps = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    if len(steps) < FEWEST_STEPS or steps["host"].isna().any():
        raise InputError(
            f"a step cost needs at least {FEWEST_STEPS} live steps that tell when they were "
            "launched: give a run that `dooly validate -o` wrote"
        )
    if not any(run.limits is None or run.limits.async_scheduling for run in live):
        return HostCost(serial=_in_series(steps, places))
    modes = [Mode(mode) for mode in sorted(steps["mode"].unique())]
    quickest = max(modes)  # whole graphs, where there are any
    host = _affine(steps[steps["mode"] == quickest], "host")
    launch = {}
    for mode in modes:
        if mode != quickest:
            of_mode = steps[steps["mode"] == mode]
            before = host.step_us + host.request_us * of_mode["requests"]
            rest = of_mode.assign(launch=of_mode["host"] - before)
            launch[mode] = _affine(rest, "launch")
    # What is launched slowly is seen late: only whole graphs tell the device's gaps.
    device = steps[steps["device_bound"] & (steps["mode"] == quickest)]
    serial = _affine(device, "beyond") if len(device) >= FEWEST_STEPS else Affine()
    return HostCost(serial=serial, launch=launch, host=host, output=_affine(steps, "output"))


def _table(run: Run, model: StepModel) -> pd.DataFrame:
    """One row per step: microseconds of its parts, and whether the device bounded it."""
    columns, many = Steps.of(run.steps), batches(run)
    shapes = model.shapes(many)
    operations = model.forward_only().times(many).device_us
    waited = (columns.ready_s - _next(columns.launched_s)) * 1e6 > _WAITED_US
    before = np.roll(columns.ready_s, 1)
    bound = waited & np.roll(waited, 1)
    bound[:1] = False
    return pd.DataFrame(
        {
            "mode": shapes.mode,
            "requests": shapes.requests,
            "tokens": shapes.tokens,
            "whole": (columns.end_s - columns.start_s) * 1e6,
            "operations": operations,
            "host": (columns.launched_s - columns.start_s) * 1e6,
            "output": (columns.end_s - columns.ready_s) * 1e6,
            "beyond": (columns.ready_s - before) * 1e6 - operations,
            "device_bound": bound,
        }
    )


def _in_series(steps: pd.DataFrame, places: Sequence[int]) -> Affine:
    """``a + b * requests + curve(tokens)`` beyond the operations: relative errors, outliers damped.

    The curve has points at those `places` where steps are; it is level beyond the last one.
    """
    whole, operations = steps["whole"].to_numpy(), steps["operations"].to_numpy()
    tokens = steps["tokens"].to_numpy(float)
    seen = [
        place
        for place, before in zip(places, (0, *places), strict=False)
        if (tokens > before).sum() >= _FEWEST_THERE
    ]
    hats = [np.interp(tokens, (0, *seen), row) for row in np.eye(len(seen) + 1)[1:]]
    factors = np.column_stack([np.ones(len(steps)), steps["requests"], *hats])
    relative, beyond = factors / whole[:, None], (whole - operations) / whole

    def residuals(coefficients: Numbers) -> Numbers:
        return relative @ coefficients - beyond

    start, *_ = np.linalg.lstsq(relative, beyond, rcond=None)
    found = least_squares(residuals, start, loss="soft_l1", f_scale=_DAMPED, x_scale="jac")
    step_us, request_us, *values = (float(value) for value in found.x)
    return Affine(step_us, request_us, curve=tuple(zip(map(float, seen), values, strict=True)))


def _next(values: Numbers) -> Numbers:
    """The following step's value; none after the last."""
    return np.append(values[1:], np.nan)


def _affine(steps: pd.DataFrame, column: str) -> Affine:
    """``a + b * requests``, neither negative, through the medians at every number of requests."""
    groups = steps.groupby("requests")[column].agg(["median", "size"])
    weights = np.sqrt(groups["size"].to_numpy(float))
    requests = groups.index.to_numpy(float)
    factors: npt.NDArray[np.float64] = np.column_stack([np.ones(len(groups)), requests])
    if len(groups) == 1:
        factors = factors[:, :1]
    fitted, _ = nnls(factors * weights[:, None], groups["median"].to_numpy(float) * weights)
    return Affine(float(fitted[0]), float(fitted[1]) if len(fitted) > 1 else 0.0)
