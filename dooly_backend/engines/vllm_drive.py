"""Driving vLLM's EngineCore and writing down what it schedules and when.

The loop is that of vLLM's own in-process client (`InprocClient.get_output` in
`vllm/v1/engine/core_client.py`: `step_fn`, then `post_step`), with requests
added between two calls, as `EngineCoreProc.run_busy_loop` adds those that its
queue holds. The same loop runs a live engine on the wall clock and, with an
executor that computes nothing, a simulated one on a virtual clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from dooly_backend.engines.serving import Arrivals
from dooly_backend.errors import EngineError
from dooly_backend.simulation.records import (
    RequestRecord,
    ScheduledRequest,
    ServingRequest,
    StepRecord,
    StepTime,
)


class Clock(Protocol):
    """The time of a run, in seconds since it began.

    A clock of the wall runs by itself. A virtual one is told what happens.
    """

    def now(self) -> float: ...

    def wait(self, until_s: float) -> None:
        """Let time pass; nothing runs meanwhile."""
        ...

    def scheduled(self, output: Any) -> StepTime | None:
        """A step has been scheduled; what it takes, where that is known before."""
        ...

    def awaited(self, output: Any) -> None:
        """The result of a step is needed."""
        ...

    def noted(self, output: Any) -> None:
        """The scheduler has taken the result of a step."""
        ...


class WallClock:
    """The host's clock, from 0."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def wait(self, until_s: float) -> None:
        if (left := until_s - self.now()) > 0:
            time.sleep(left)

    def scheduled(self, output: Any) -> StepTime | None:
        return None

    def awaited(self, output: Any) -> None:
        pass

    def noted(self, output: Any) -> None:
        pass


@dataclass
class _Step:
    """A step as it happens. vLLM's output object is read after the run: reading takes time."""

    output: Any
    start_s: float
    launched_s: float = 0.0
    ready_s: float = 0.0
    end_s: float = 0.0
    time: StepTime | None = None


@dataclass
class Journal:
    """What happened, in the order in which it did."""

    clock: Clock
    calls: int = 0
    steps: list[_Step] = field(default_factory=list)
    tokens: dict[int, list[float]] = field(default_factory=dict)
    arrived: dict[int, ServingRequest] = field(default_factory=dict)
    admitted: dict[int, int] = field(default_factory=dict)
    preemptions: dict[int, int] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)  # since the loop last looked
    _open: list[_Step] = field(default_factory=list)  # scheduled, not yet out
    _launching: _Step | None = None

    @contextmanager
    def watching(self, core: Any) -> Iterator[None]:
        """Note every step of `core` while the block runs."""
        scheduler, executor = core.scheduler, core.model_executor
        schedule, update = scheduler.schedule, scheduler.update_from_output
        execute, sample = executor.execute_model, executor.sample_tokens

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            start = self.clock.now()
            output = schedule(*args, **kwargs)
            self.calls += 1
            self._launching = None
            if output.total_num_scheduled_tokens:
                self._launching = _Step(output, start, time=self.clock.scheduled(output))
                self.steps.append(self._launching)
                self._open.append(self._launching)
            return output

        def launched(inner: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = inner(*args, **kwargs)
                # Not where it blocks: then the step is done, and was launched before.
                if kwargs.get("non_block") and self._launching:
                    self._launching.launched_s = self.clock.now()
                return result

            return call

        def updated(output: Any, *args: Any, **kwargs: Any) -> Any:
            if not output.total_num_scheduled_tokens:
                return update(output, *args, **kwargs)
            self.clock.awaited(output)
            ready = self.clock.now()
            outputs = update(output, *args, **kwargs)
            self.clock.noted(output)
            end = self.clock.now()
            step = self._open.pop(0)
            assert step.output is output  # vLLM takes outputs first in, first out
            step.ready_s, step.end_s = ready, end
            self._note(outputs, end)
            return outputs

        scheduler.schedule, scheduler.update_from_output = scheduled, updated
        executor.execute_model, executor.sample_tokens = launched(execute), launched(sample)
        try:
            yield
        finally:
            del scheduler.schedule, scheduler.update_from_output
            del executor.execute_model, executor.sample_tokens

    def _note(self, outputs: Mapping[int, Any], end_s: float) -> None:
        for client in outputs.values():
            for output in client.outputs:
                request = int(output.request_id)
                self.tokens[request] += [end_s] * len(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ended.append(request)

    # -- afterwards ------------------------------------------------------------------------

    def records(self) -> tuple[tuple[StepRecord, ...], tuple[RequestRecord, ...]]:
        """The steps and the requests of the run. Raises EngineError for one that went wrong."""
        steps = tuple(
            StepRecord(
                step.start_s,
                step.end_s,
                scheduled_requests(step.output),
                tuple(sorted(map(int, step.output.preempted_req_ids or ()))),
                step.launched_s,
                step.ready_s,
                step.time,
            )
            for step in self.steps
        )
        first: dict[int, tuple[float, int]] = {}
        for step in steps:
            for part in step.scheduled:
                first.setdefault(part.id, (step.start_s, part.context))
        requests = []
        for identity, request in sorted(self.arrived.items()):
            if len(self.tokens[identity]) != request.output_tokens:
                raise EngineError(
                    f"request {identity} got {len(self.tokens[identity])} tokens of "
                    f"{request.output_tokens}: vLLM ended it early"
                )
            scheduled_s, cached = first[identity]
            requests.append(
                RequestRecord(
                    request,
                    scheduled_s,
                    tuple(self.tokens[identity]),
                    cached,
                    self.preemptions[identity],
                    self.admitted[identity],
                )
            )
        return steps, tuple(requests)


def scheduled_requests(output: Any) -> tuple[ScheduledRequest, ...]:
    """What a SchedulerOutput computes, in the scheduler's order."""
    context = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    context.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return tuple(
        ScheduledRequest(int(name), query, context[name])
        for name, query in output.num_scheduled_tokens.items()
    )


def drive(core: Any, arrivals: Arrivals, prepared: Mapping[int, Any], journal: Journal) -> None:
    """Serve what `arrivals` hands out, until all has ended.

    `prepared` has vLLM's `Request` of every request by its id.
    """
    clock, scheduler = journal.clock, core.scheduler
    with journal.watching(core):
        while True:
            now = clock.now()
            for request in arrivals.due(now, journal.calls):
                made = prepared[request.id]
                # The policy "priority" compares it: the order of arrival, without ties.
                made.arrival_time = float(len(journal.arrived))
                journal.arrived[request.id] = request
                journal.admitted[request.id] = journal.calls
                journal.tokens[request.id] = []
                core.add_request(made)
            if not (scheduler.has_requests() or core.batch_queue):
                after = arrivals.skip()
                if after is None:
                    return
                clock.wait(after)
                continue
            _, executed = core.step_fn()
            core.post_step(executed)
            for identity in journal.ended:
                journal.preemptions[identity] = prepared[identity].num_preemptions
                arrivals.finished(identity, clock.now())
            journal.ended.clear()


def vllm_request(core: Any, request: ServingRequest, tokens: list[int]) -> Any:
    """VLLM's own record of `request`, ready to be added: greedy, and never ending early."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    made, _ = core.preprocess_add_request(
        EngineCoreRequest(
            request_id=str(request.id),
            prompt_token_ids=tokens,
            mm_features=None,
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True
            ),
            pooling_params=None,
            arrival_time=0.0,  # set when it arrives
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            priority=request.priority,
        )
    )
    return made
