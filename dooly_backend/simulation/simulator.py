"""The reference simulator: a scheduler decides the batches, a timer what each step takes.

with Database.open("latency.db", read_only=True) as database:
timer = StepModel.of(LatencyModel.load(database, "SmolLM-135M"))
run = simulate(load_workload("fixed:rate=2"), limits, timer)
Metrics(run).summary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from dooly_backend.simulation.arrivals import Feed, as_admitted
from dooly_backend.simulation.records import (
    Batches,
    Run,
    ServingLimits,
    ServingRequest,
    StepTime,
    StepTimer,
)
from dooly_backend.workload import Batch, Request

#: Whose scheduler decides: Dooly's, which needs no engine, or the engine's own.
SchedulerName = Literal["dooly", "engine"]


def simulate(
    requests: Sequence[ServingRequest],
    limits: ServingLimits,
    timer: StepTimer,
    *,
    concurrency: int | None = None,
    by_step: bool = False,
    scheduler: SchedulerName = "dooly",
) -> Run:
    """Serve `requests` on a virtual clock.

    `concurrency` and `by_step` are as in `arrivals.Feed`. Raises InputError for
    a request that the limits have no room for, EngineError where the engine's
    scheduler is wanted and it is not installed.
    """
    feed = Feed(requests, by_step=by_step, concurrency=concurrency)
    if scheduler == "engine":
        from dooly_backend.engines.vllm_scheduler import EngineScheduler

        with EngineScheduler(limits) as engine:
            return engine.run(feed, timer)
    from dooly_backend.simulation.scheduler import run

    return run(feed, limits, timer)


def replayed(live: Run, *, scheduler: SchedulerName = "dooly") -> Run:
    """The requests of a live run again, each joining the queue where it did, by the step.

    What a step takes does not matter then: the schedule shows the scheduler alone.
    """
    if live.limits is None:
        raise ValueError("a run without limits cannot be replayed")
    return simulate(as_admitted(live), live.limits, EqualSteps(), by_step=True, scheduler=scheduler)


class EqualSteps:
    """A timer for which every step takes a millisecond."""

    def time(self, batch: Batch) -> StepTime:
        return StepTime(1000.0)


def batches(run: Run) -> Batches:
    """The batches of the run's steps."""
    return Batches.of(
        [Batch(tuple(Request(s.query, s.context) for s in step.scheduled)) for step in run.steps]
    )
