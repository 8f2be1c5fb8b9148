"""Runs as arrays hold the same as their records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dooly_backend.simulation.blocks import BlockPool
from dooly_backend.simulation.columns import Requests, Steps
from dooly_backend.simulation.log import ranges
from dooly_backend.simulation.records import ServingLimits, ServingRequest
from dooly_backend.simulation.run_file import load_run, save_run
from dooly_backend.simulation.scheduler import simulate
from integration.schedules.cases import MadeUpTimer
from tests.test_run_file import random_run


@pytest.mark.parametrize("timed", [True, False])
def test_columns_hold_the_records(timed: bool) -> None:
    for seed in range(10):
        run = random_run(seed, timed)
        steps, requests = Steps.of(run.steps), Requests.of(run.requests)
        assert tuple(steps) == run.steps
        assert tuple(requests) == run.requests
        assert steps == run.steps
        assert steps[-1] == run.steps[-1]
        assert steps[3:7] == run.steps[3:7]
        assert Steps.of(steps) is steps
        assert steps != run.steps[:-1]
        with pytest.raises(IndexError):
            steps[len(run.steps)]


def test_a_simulated_run_is_columns_and_survives_the_file(tmp_path: Path) -> None:
    limits = ServingLimits(8, 64, 256, 60, 16)
    requests = [ServingRequest(i, i / 500, 50, 30) for i in range(40)]
    run = simulate(requests, limits, MadeUpTimer(64.0, 32.0))
    assert isinstance(run.steps, Steps)
    assert isinstance(run.requests, Requests)
    assert run.steps.query.sum() == sum(len(r.token_s) - 1 for r in run.requests) + 40 * 50
    save_run(run, tmp_path / "run.json.xz")
    again = load_run(tmp_path / "run.json.xz")
    assert [s.scheduled for s in again.steps] == [s.scheduled for s in run.steps]
    assert [s.time for s in again.steps] == [s.time for s in run.steps]
    for ours, theirs in zip(again.requests, run.requests, strict=True):
        assert ours.token_s == pytest.approx(theirs.token_s, abs=1e-9)
        assert replace(ours, token_s=(), scheduled_s=0, request=theirs.request) == replace(
            theirs, token_s=(), scheduled_s=0
        )


def test_ranges() -> None:
    found = ranges(np.array([5, 0, 9]), np.array([2, 0, 3]))
    assert found.tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.array([], np.int64), np.array([], np.int64)).tolist() == []


def test_blocks_are_given_out_unhashed_first_and_then_the_oldest() -> None:
    pool = BlockPool(11)
    assert pool.free == 10
    pool.allocate(6)
    first, second = pool.cache(1), pool.cache(2)
    pool.release(0, 0, [second, first])  # the last block of a request goes first
    pool.release(2, 2)
    assert (pool.free, pool.find(1), pool.find(2)) == (10, first, second)
    pool.allocate(6)  # those without a hash
    assert (pool.find(1), pool.find(2)) == (first, second)
    pool.allocate(1)
    assert (pool.find(1), pool.find(2)) == (first, None)
    pool.touch([first])
    assert pool.free == 2
    pool.allocate(2)
    assert (pool.free, pool.find(1)) == (0, first)
