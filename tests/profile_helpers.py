"""What tests of the profiler share: a copy of the profiled database, and what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dooly_backend.config import Sweep, load_sweep
from dooly_backend.database import Database
from dooly_backend.database.records import Measurement
from dooly_backend.profiling.measure import Regime

SMOKE = load_sweep("smoke")
QUICK = Regime(repeats=3, warmups=0, rounds=1)
Measured = dict[tuple[str, str], Measurement]


def measured(path: Path) -> Measured:
    """Everything measured, by signature and point."""
    with Database.open(path, read_only=True) as database:
        (environment_id,) = database.environments()
        return {
            (digest, m.point.key): m
            for digest in database.signatures()
            for m in database.measurements(digest, environment_id)
        }


def widened(**changes: Any) -> Sweep:
    return Sweep.model_validate(SMOKE.model_dump() | changes)
