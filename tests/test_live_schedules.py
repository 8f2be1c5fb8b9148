"""Live vLLM, vLLM's scheduler without a model and our own: the same steps, one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dooly_backend.simulation.arrivals import as_admitted
from dooly_backend.simulation.compare import schedule_agreement
from dooly_backend.simulation.records import Run
from dooly_backend.simulation.run_file import load_run
from dooly_backend.simulation.scheduler import simulate
from integration.schedules.cases import MadeUpTimer
from tests.live_schedules import SETTINGS, WORKLOADS

pytestmark = pytest.mark.engine

TIMER = MadeUpTimer(64.0, 32.0)
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def live(needs_engine: None, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Run]:
    """What live vLLM did, by settings and workload."""
    folder = tmp_path_factory.mktemp("live")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "live_schedules.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        f"{name}-{workload}": load_run(folder / f"{name}-{workload}.json.gz")
        for name in SETTINGS
        for workload in WORKLOADS
    }


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("scheduler", ["dooly", "engine"])
def test_schedules_equal_live_ones(
    live: Mapping[str, Run], scheduler: str, name: str, workload: str
) -> None:
    run = live[f"{name}-{workload}"]
    assert run.limits is not None
    # By the clock, a request comes where it came live: after so many steps.
    requests = as_admitted(run) if workload == "clock" else WORKLOADS[workload]
    simulated = simulate(requests, run.limits, TIMER, scheduler, by_step=True)  # type: ignore[arg-type]
    assert schedule_agreement(run, simulated) == 100.0
    for ours, theirs in zip(simulated.requests, run.requests, strict=True):
        assert ours.cached_tokens == theirs.cached_tokens
        assert ours.preemptions == theirs.preemptions
        assert ours.admitted == theirs.admitted
        assert len(ours.token_s) == len(theirs.token_s)


def test_the_runs_try_what_is_hard(live: Mapping[str, Run]) -> None:
    for name, settings in SETTINGS.items():
        runs = [live[f"{name}-{workload}"] for workload in WORKLOADS]
        limits = runs[0].limits
        assert limits is not None
        assert limits.async_scheduling == settings["async_scheduling"]
        assert limits.num_gpu_blocks == settings.get("num_gpu_blocks", 20)
        assert len(limits.groups) == 1 + (name == "windows")
        requests = [request for run in runs for request in run.requests]
        assert sum(request.preemptions for request in requests) > 3
        if limits.enable_prefix_caching:
            assert sum(request.cached_tokens > 0 for request in requests) > 3
        chunks = [part for run in runs for step in run.steps for part in step.scheduled]
        assert any(part.query > 1 and part.context > 0 for part in chunks)


def test_times_of_a_live_run_are_in_order(live: Mapping[str, Run]) -> None:
    for name, run in live.items():
        for before, after in zip(run.steps, run.steps[1:], strict=False):
            assert before.start_s <= after.start_s
            assert before.end_s <= after.end_s
        for step in run.steps:
            assert step.launched_s is not None
            assert step.ready_s is not None
            assert step.start_s <= step.launched_s <= step.ready_s <= step.end_s
        overlap = any(a.end_s > b.start_s for a, b in zip(run.steps, run.steps[1:], strict=False))
        # Asynchronous: a step is scheduled before the one before it is out.
        assert overlap == (not name.startswith(("sync", "unlike")))
        for request in run.requests:
            assert request.request.arrival_s <= request.scheduled_s < request.token_s[0]
