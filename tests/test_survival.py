"""A real profile that is killed in the middle, in few rounds (integration/survival has many)."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from profile_helpers import QUICK, widened

from dooly_backend.database import Database
from dooly_backend.database.check import check_file
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.profiling.profiler import profile
from integration.survival.run import committed, is_worse


def test_a_killed_profile_goes_on_where_it_was(engine: VllmEngine, tmp_path: Path) -> None:
    """The engine is forked, not started again: what is killed is the profile of a real model."""
    path = tmp_path / "latency.db"
    sweep = widened(
        tokens=[1, 16, 48, 64], prefill={"chunk": [16, 64], "history": [0, 64]}, requests=[1, 2, 4]
    )
    known: dict = {}
    rng = random.Random(5)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                with Database.open(path, create=True) as database:
                    profile(engine, database, sweep, QUICK)
            finally:
                os._exit(1)  # nothing of pytest's runs in the child
        wanted = len(known) + rng.randint(1, 12)
        deadline = time.monotonic() + 120
        while len(seen := committed(path)) < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        left = committed(path)
        assert len(left) >= wanted
        assert seen.keys() <= left.keys()
        assert not any(is_worse(seen[key], left[key]) for key in seen)
        assert check_file(path).ok
        known = left
    with Database.open(path) as database:
        result = profile(engine, database, sweep, QUICK)
    final = committed(path)
    assert result.points == len(final) - len(known)
    assert known.keys() <= final.keys()
    assert not any(is_worse(known[key], final[key]) for key in known)
    report = check_file(path)
    assert (report.problems, report.notes) == ((), ())
