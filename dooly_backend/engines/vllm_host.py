"""What vLLM's EngineCore does on the host for a step: the scheduler before, the tokens after.

An injected step (`Engine.pipelined_steps`) has neither. They are timed here with
vLLM's own scheduler and an executor that computes nothing: `schedule` and
`update_from_output` as `step` and `step_with_batch_queue` of
`vllm/v1/engine/core.py` call them (the same in 0.25.1 and 0.32).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dooly_backend.database.records import HostStep
from dooly_backend.engines.prompts import prompt
from dooly_backend.engines.vllm_drive import vllm_request
from dooly_backend.engines.vllm_scheduler import EngineScheduler
from dooly_backend.errors import EngineError
from dooly_backend.simulation.records import ServingLimits, ServingRequest

_PROMPT = 16  # tokens: short, so that all requests start in one step where they can
_VOCAB_SIZE = 32000


def host_steps(limits: ServingLimits, requests: Sequence[int], repeats: int) -> list[HostStep]:
    """The host's part of `repeats` decode steps of each of so many `requests`.

    Raises InputError for limits that vLLM does not take, EngineError where so many
    requests never decode together.
    """
    with EngineScheduler(limits) as scheduler:
        # Once ahead: the first calls of anything are slow.
        _host_step(scheduler.core, requests[0], repeats)
        return [_host_step(scheduler.core, count, repeats) for count in requests]


def _host_step(core: Any, num_reqs: int, repeats: int) -> HostStep:
    for number in range(num_reqs):
        request = ServingRequest(number, 0.0, _PROMPT, repeats + 2)
        core.add_request(vllm_request(core, request, prompt(request, _VOCAB_SIZE)))
    watch = _Watch(num_reqs)
    with watch.over(core.scheduler):
        while core.scheduler.has_requests() or core.batch_queue:
            _, executed = core.step_fn()
            core.post_step(executed)
    # The last step is another one: its requests end.
    schedule, output = watch.schedule_us[:-1], watch.output_us[:-1]
    if not schedule or not output:
        raise EngineError(f"{num_reqs} requests never decode in one step: allow more at a time")
    return HostStep(num_reqs, tuple(schedule), tuple(output))


@dataclass
class _Watch:
    """Times of the steps in which all of `num_reqs` requests decode."""

    num_reqs: int
    schedule_us: list[float] = field(default_factory=list)
    output_us: list[float] = field(default_factory=list)

    @contextmanager
    def over(self, scheduler: Any) -> Iterator[None]:
        schedule, update = scheduler.schedule, scheduler.update_from_output

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output, us = _timed(schedule, *args, **kwargs)
            if self._counts(output):
                self.schedule_us.append(us)
            return output

        def updated(output: Any, *args: Any, **kwargs: Any) -> Any:
            result, us = _timed(update, output, *args, **kwargs)
            if self._counts(output):
                self.output_us.append(us)
            return result

        scheduler.schedule, scheduler.update_from_output = scheduled, updated
        try:
            yield
        finally:
            del scheduler.schedule, scheduler.update_from_output

    def _counts(self, output: Any) -> bool:
        same = output.total_num_scheduled_tokens == len(output.num_scheduled_tokens)
        return same and output.total_num_scheduled_tokens == self.num_reqs


def _timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, float]:
    start = time.perf_counter_ns()
    result = call(*args, **kwargs)
    return result, (time.perf_counter_ns() - start) / 1000
