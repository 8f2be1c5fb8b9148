"""A small run written by hand: two requests, four steps, numbers that can be checked."""

from __future__ import annotations

from dooly_backend.simulation.records import (
    RequestRecord,
    Run,
    ScheduledRequest,
    ServingRequest,
    StepRecord,
    StepTime,
)

FIRST = ServingRequest(0, 0.0, 100, 3)
SECOND = ServingRequest(1, 0.5, 50, 2)


def step(start: float, end: float, *scheduled: tuple[int, int, int], **more: object) -> StepRecord:
    time = StepTime((end - start) * 1e6 * 0.9, host_us=100.0)
    return StepRecord(
        start, end, tuple(ScheduledRequest(*s) for s in scheduled), **{"time": time, **more}
    )


RUN = Run(
    steps=(
        step(0.0, 1.0, (0, 100, 0)),
        step(1.0, 2.0, (0, 1, 100), (1, 50, 0)),
        step(2.0, 2.5, (0, 1, 101), (1, 1, 50)),
        step(2.75, 3.0, (1, 1, 51)),
    ),
    requests=(
        RequestRecord(FIRST, 0.0, (1.0, 2.0, 2.5)),
        RequestRecord(SECOND, 1.0, (2.0, 3.0), cached_tokens=16, preemptions=1),
    ),
)
