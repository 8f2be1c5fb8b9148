"""The search for a Gaussian process's variance, lengths and noise (regression/corrected.py)."""

from __future__ import annotations

import numpy as np
import pytest

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.corrected import fit_process

_VARIANCE, _LENGTH, _NOISE = 4e-4, 0.3, 7e-4


def _kernel(points: Floats, variance: float, length: float, noise: float) -> Floats:
    distance = np.abs(points - points.T) * 3**0.5 / length
    kernel: Floats = variance * (1 + distance) * np.exp(-distance)
    kernel[np.diag_indices_from(kernel)] += noise
    return kernel


def _log_likelihood(residuals: Floats, kernel: Floats) -> float:
    fit = residuals @ np.linalg.solve(kernel, residuals)
    return float(-0.5 * (fit + np.linalg.slogdet(kernel)[1]))


# Drawn with these, a search from one place alone ends at a process that knows nothing.
@pytest.mark.parametrize("seed", [33, 37])
def test_what_is_found_is_as_likely_as_what_the_residuals_were_drawn_from(seed: int) -> None:
    points = np.linspace(0, 9, 60)[:, None]
    drawn = np.random.RandomState(seed).standard_normal(60)
    true = _kernel(points, _VARIANCE, _LENGTH, _NOISE)
    residuals = np.linalg.cholesky(true) @ drawn
    measured = np.full(60, 1e-3)
    hyper = fit_process(points, residuals, measured, None)["hyper"]
    found = _kernel(points, hyper["variance"], hyper["lengths"][0], hyper["noise"] + 1e-6)
    assert _log_likelihood(residuals, found) >= _log_likelihood(residuals, true) - 0.05
