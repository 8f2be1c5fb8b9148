"""What a step costs beyond its operations: fitted to live steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from dooly_backend.database.records import StepCost, StepMeasurement
from dooly_backend.errors import InputError

FEWEST_STEPS = 3


def fit_step_cost(steps: Sequence[StepMeasurement]) -> StepCost:
    """Least squares of (live median - operations) on (1, layers, requests), none negative.

    Each step's residual counts relative to its length.

    Layers or requests that do not vary cannot be told from the step itself:
    they cost nothing on their own, and all of it is the step's. Raises
    InputError with fewer than three steps.
    """
    if len(steps) < FEWEST_STEPS:
        raise InputError(
            f"a step cost needs at least {FEWEST_STEPS} live steps, not {len(steps)}: "
            "run `dooly profile` with the engine installed"
        )
    live = np.array([statistics.median(step.live_us) for step in steps])
    beyond = live - np.array([step.operations_us for step in steps])
    factors = np.array([(1.0, step.num_layers, step.batch.num_reqs) for step in steps])
    varies = np.ptp(factors, axis=0) > 0
    varies[0] = True
    coefficients = np.zeros(factors.shape[1])
    # Relative to the step: what is noise in a long prefill would be all of a decode.
    weights = 1 / live
    coefficients[varies], _ = nnls(factors[:, varies] * weights[:, None], beyond * weights)
    return StepCost(*(float(coefficient) for coefficient in coefficients))
