"""Points that cannot run are recorded with their reason."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from conftest import Profiled
from engine_helpers import state
from profile_helpers import QUICK, widened

from dooly_backend.database import Database
from dooly_backend.database.check import check_file
from dooly_backend.engine_commands import _lines
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.profiling import profiler
from dooly_backend.profiling.profiler import profile
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch


@pytest.fixture
def path(profiled: Profiled, tmp_path: Path) -> Path:
    """A copy of the profiled database."""
    return Path(shutil.copy(profiled.path, tmp_path / "latency.db"))


# -- points that cannot run -----------------------------------------------------


def skipped(path: Path) -> dict[str, str]:
    with Database.open(path, read_only=True) as database:
        (environment_id,) = database.environments()
        return {
            s.point.key: s.reason
            for digest in database.signatures()
            for s in database.skipped(digest, environment_id)
        }


def test_a_point_without_room_is_kept_with_its_reason(
    engine: VllmEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = widened(decode={"batch": [1, 16], "context": [64, 1500]})
    with monkeypatch.context() as patch, Database.open(path) as database:
        patch.setattr(engine._steps, "_free", engine._steps._free[:100])
        result = profile(engine, database, sweep, QUICK)
    assert (result.points, result.skipped) == (1, 1)  # a single long decode did fit
    reasons = skipped(path)
    assert set(reasons) == {"batch=16x1+1500"}
    assert reasons["batch=16x1+1500"].startswith("the KV cache has ")
    with Database.open(path) as database:
        again = profile(engine, database, sweep, QUICK)
        assert (again.points, again.skipped, again.signatures_new) == (0, 0, 0)
        LatencyModel.load(database).step_us(Batch.decode(16, 1500))  # from what was measured


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nSee documentation"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate "
                     "memory: you tried to allocate 9 bytes."),
        MemoryError(),
    ],
    ids=["device", "host", "python"],
)  # fmt: skip
def test_memory_that_runs_out_is_a_reason(
    engine: VllmEngine, path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patch, Database.open(path) as database:
        patch.setattr(profiler, "measure", fails)
        result = profile(engine, database, widened(requests=[1, 7]), QUICK)
    assert (result.points, result.skipped) == (0, 2)
    (reason,) = set(skipped(path).values())
    assert reason.startswith("out of memory: ")
    assert "\n" not in reason
    assert state(engine)[1:] == (0, 0)


def test_any_other_error_is_no_reason(
    engine: VllmEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch, Database.open(path) as database:
        patch.setattr(profiler, "measure", fails)
        with pytest.raises(RuntimeError, match="a bug"):
            profile(engine, database, widened(requests=[1, 7]), QUICK)
    assert not skipped(path)


def test_points_beyond_the_engines_limits_are_recorded(engine: VllmEngine, path: Path) -> None:
    sweep = widened(tokens=[16, 4096], decode={"batch": [1, 100], "context": [64]})
    with Database.open(path) as database:
        result = profile(engine, database, sweep, QUICK)
        again = profile(engine, database, sweep, QUICK)
    assert (result.points, again.points, again.skipped) == (0, 0, 0)
    tokens = "beyond the engine's limits: 4096 tokens a step, it takes 2048"
    requests = "beyond the engine's limits: 100 requests a step, it takes 64"
    assert {reason: set(keys) for reason, keys in result.reasons.items()} == {
        tokens: {"tokens=4096"},
        requests: {"batch=100x1+64"},
    }
    assert result.skipped == 9 + 1
    assert skipped(path) == {"tokens=4096": tokens, "batch=100x1+64": requests}
    assert f"skipped, {tokens}: tokens=4096" in "\n".join(_lines(result, "latency.db"))
    with Database.open(path) as database:  # open to an engine with other limits
        for digest in database.signatures():
            assert not {"tokens=4096", "batch=100x1+64"} & database.settled_points(digest, 1)
    assert check_file(path).ok
