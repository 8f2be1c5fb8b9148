"""What prefills and decodes take together, told from batches with both."""

from __future__ import annotations

import numpy as np
import pytest

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.joint import LONGEST, Joint, fit_joint
from dooly_backend.regression.models import Training

#: What prefills and decodes take alone, microseconds, and keys of the longest decode.
ONE = np.array([12.0, 20.0, 40.0, 80.0, 160.0, 30.0, 60.0, 120.0, 240.0, 50.0])
OTHER = np.array([30.0, 14.0, 25.0, 90.0, 45.0, 70.0, 18.0, 200.0, 110.0, 35.0])
KEYS = np.array([300.0, 400.0, 500.0, 600.0, 700.0, 350.0, 450.0, 550.0, 650.0, 750.0])
CHEAPEST = 10.0  # a batch of decodes alone


def fitted(us: Floats, keys: Floats = KEYS) -> Joint:
    rows = np.append(keys, 10.0)[:, None]
    data = Training("batch", (LONGEST,), rows, np.append(us, CHEAPEST), np.zeros(len(us) + 1))
    return fit_joint(data, np.append(ONE, 0.0), np.append(OTHER, CHEAPEST))


@pytest.mark.parametrize("launch", [0.0, 2.5, 5.0, 7.5, 10.0])
def test_launch_and_share_are_told_from_measured_batches(launch: float) -> None:
    truth = Joint(launch, 0.4)
    found = fitted(truth.many(ONE, OTHER, KEYS))
    assert (found.launch, found.share, found.chain) == pytest.approx((launch, 0.4, 0.0))


@pytest.mark.parametrize("batches", [1, 2, 3, 4])
def test_a_chain_bounds_as_many_batches_as_a_parameter_needs(batches: int) -> None:
    """One or two batches that something else disturbed are no bound of their own."""
    keys = KEYS / 10
    keys[:batches] = 4000.0
    us = Joint(5.0, 0.4, 0.15).many(ONE, OTHER, keys)
    found = fitted(us, keys)
    without = Joint(found.launch, found.share).many(ONE, OTHER, keys)
    bounded = int((found.many(ONE, OTHER, keys) > without).sum())
    if batches < 3:
        assert not found.chain or bounded >= 3
    else:
        assert (found.chain, bounded) == (pytest.approx(0.15), batches)
