"""Which requests every step computes: the engine's own scheduler, or ours that is its equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dooly_backend.engines.serving import refuse_limits, refuse_too_long
from dooly_backend.simulation.arrivals import Feed
from dooly_backend.simulation.fast import run_fast
from dooly_backend.simulation.records import (
    Batches,
    ManyStepTimer,
    Run,
    ServingLimits,
    ServingRequest,
    StepTimer,
    StepTimes,
)
from dooly_backend.workload import Batch, Request

SchedulerName = Literal["engine", "dooly"]


def simulate(
    requests: Sequence[ServingRequest],
    limits: ServingLimits,
    timer: StepTimer | ManyStepTimer,
    scheduler: SchedulerName = "dooly",
    *,
    by_step: bool = False,
    concurrency: int | None = None,
) -> Run:
    """Serve `requests` on a virtual clock; `timer` says what a step takes.

    "dooly" is a scheduler in plain Python that needs no engine, "engine" is vLLM's
    own, which it is tested against. Arrivals are as in `arrivals.Feed`. Raises
    InputError for requests or limits that do not fit, EngineError without an engine.
    """
    clock = getattr(timer, "clock", None)
    feed = Feed(requests, by_step=by_step, concurrency=concurrency)
    refuse_limits(limits)
    if scheduler == "engine":
        from dooly_backend.engines.vllm_scheduler import EngineScheduler

        with EngineScheduler(limits) as engine:
            return engine.run(feed, timer, clock)
    refuse_too_long(requests, limits)
    many: Any = timer if hasattr(timer, "times") else OneByOne(timer)
    return run_fast(feed, limits, many, clock)


class OneByOne:
    """A timer of one step at a time, asked for many."""

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self.time = timer.time
        self.launches_wait = getattr(timer, "launches_wait", False)

    def times(self, batches: Batches) -> StepTimes:
        ends = [*batches.starts[1:].tolist(), len(batches.query)]
        query, context = batches.query.tolist(), batches.context.tolist()
        times = [
            self._timer.time(Batch(tuple(map(Request, query[a:b], context[a:b]))))
            for a, b in zip(batches.starts.tolist(), ends, strict=True)
        ]
        return StepTimes(
            np.array([time.device_us for time in times]),
            np.array([time.host_us for time in times]),
            np.array([time.output_us for time in times]),
            np.array([time.extrapolated for time in times], np.bool_),
            np.array([time.launch_us for time in times]),
            np.array([time.tokens for time in times], np.int64),
            np.array([time.later_us for time in times]) if times[0].later_us else None,
        )
