"""When requests come: by the clock, by the step, or when another one has ended."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from dooly_backend.errors import InputError
from dooly_backend.simulation.records import Run, ServingRequest


class Feed:
    """Hands out the requests of a workload, each once, in the order in which they come.

    With `by_step`, `arrival_s` counts calls of the scheduler instead of seconds: a
    request of 5 is there at the sixth call. Where nothing is left to schedule the
    next one comes at once. With `concurrency` the loop is closed: so many requests
    come at the start, and one more whenever one has ended, in the order given;
    `arrival_s` is not looked at. Requests handed out tell when they really came.
    """

    def __init__(
        self,
        requests: Sequence[ServingRequest],
        by_step: bool = False,
        concurrency: int | None = None,
    ) -> None:
        if len({request.id for request in requests}) != len(requests):
            raise InputError("two requests of the workload have the same id")
        if concurrency is not None and concurrency < 1:
            raise InputError(f"a concurrency of {concurrency} serves nothing: give one or more")
        if concurrency is not None and by_step:
            raise InputError("in a closed loop requests come when others end, not by step")
        self._all = tuple(requests)
        self._by_step = by_step
        self._closed = concurrency is not None
        self._timed = not by_step and not self._closed
        # Python's sort is stable: what comes at the same time keeps its order.
        order = requests if self._closed else sorted(requests, key=lambda r: r.arrival_s)
        self._waiting = deque(order)
        self._released = min(concurrency or 0, len(requests))
        self._released_s = deque([0.0] * self._released)
        self._idle_until = 0.0

    def due(self, now_s: float, calls: int) -> Sequence[ServingRequest]:
        """The requests that came since the last call, up to `now_s` or to the call `calls`."""
        if self._closed:
            return [came(self._waiting.popleft(), s) for s in self._take_released()]
        if self._by_step:
            return [came(r, now_s) for r in self._until(max(calls, self._idle_until))]
        return self._until(now_s)

    def finished(self, request_id: int, now_s: float) -> None:
        """A request ended: in a closed loop the next one comes."""
        if self._closed and self._released < len(self._all):
            self._released += 1
            self._released_s.append(now_s)

    def skip(self) -> float | None:
        """When the next request comes; None when none will. By step it is due at once."""
        if not self._waiting:
            return None
        if self._closed:
            return 0.0
        arrival = self._waiting[0].arrival_s
        if self._by_step:
            self._idle_until = arrival
            return 0.0
        return arrival

    @property
    def next_s(self) -> float | None:
        """When the next request comes, if the clock alone decides that; else None."""
        return self._waiting[0].arrival_s if self._timed and self._waiting else None

    @property
    def next_call(self) -> float:
        """How often the scheduler will have been called when the next one comes, if by step."""
        return self._waiting[0].arrival_s if self._by_step and self._waiting else math.inf

    def everything(self) -> Sequence[ServingRequest]:
        """All requests of the workload."""
        return self._all

    def _until(self, arrival: float) -> list[ServingRequest]:
        requests = []
        while self._waiting and self._waiting[0].arrival_s <= arrival:
            requests.append(self._waiting.popleft())
        return requests

    def _take_released(self) -> list[float]:
        taken = list(self._released_s)
        self._released_s.clear()
        return taken


def came(request: ServingRequest, arrival_s: float) -> ServingRequest:
    """`request` with another time of arrival; `dataclasses.replace` takes ten times as long."""
    return ServingRequest(
        request.id,
        arrival_s,
        request.prompt_tokens,
        request.output_tokens,
        request.prefix,
        request.prefix_tokens,
        request.priority,
    )


def as_admitted(run: Run) -> list[ServingRequest]:
    """The requests of `run` with the calls of the scheduler before them as arrival.

    Served by step they are scheduled as they were, whatever the steps take.
    """
    # By id where they came together: a stable sort of records that are in that order.
    order = sorted(run.requests, key=lambda r: (r.admitted, r.request.arrival_s))
    return [came(r.request, float(r.admitted)) for r in order]
