"""What a simulation takes and what it gives: requests in, steps and request times out.

The same records describe a live run, so that the two can be compared.
Times are seconds since the run began where a name ends in `_s`, microseconds in `_us`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dooly_backend.simulation.rules import Rules
from dooly_backend.workload import Batch

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ServingRequest:
    """One request of a workload: when it comes, and how long it is.

    Requests of one `prefix` begin with the same `prefix_tokens` tokens; all
    other tokens are their own. Of two requests the one with the smaller
    `priority` goes first, under the policy "priority" alone.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: int | None = None
    prefix_tokens: int = 0
    priority: int = 0


@dataclass(frozen=True)
class KvCacheGroup:
    """Layers that share block tables. Sizes are tokens.

    `unmodelled` names what the schedulers here do not know; such limits are refused.
    """

    block_size: int
    window: int | None = None  # of sliding-window attention, at least 2; None: full attention
    unmodelled: str | None = None


@dataclass(frozen=True)
class ServingLimits:
    """The engine's settings that decide a schedule, under vLLM's names.

    `version` is the vLLM whose scheduler it is: rules change between versions.
    `kv_groups` are the model's KV cache groups, all with blocks from one pool, in
    the engine's order; none mean one of full attention.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_gpu_blocks: int  # KV capacity of one rank, in blocks
    block_size: int  # tokens
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    watermark: float = 0.0  # part of the blocks that admissions leave free
    scheduler_reserve_full_isl: bool = True  # admit only prompts that fit as a whole
    version: str = "0.32.0"
    kv_groups: tuple[KvCacheGroup, ...] = ()
    pipeline_parallel: int = 1  # stages

    @property
    def groups(self) -> tuple[KvCacheGroup, ...]:
        """`kv_groups`, or the one group that none mean."""
        return self.kv_groups or (KvCacheGroup(self.block_size),)

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be under way at once (`VllmConfig.max_concurrent_batches`).

        Asynchronous scheduling of a pipeline is that of the V2 model runner.
        """
        return self.pipeline_parallel + self.async_scheduling

    def most_blocks(self, group: KvCacheGroup) -> int:
        """Blocks that a request holds of `group` at most (`max_admission_blocks_per_request`)."""
        if group.window is None:
            return -(-self.max_model_len // group.block_size)
        batches = self.max_concurrent_batches if Rules.of(self.version).counts_in_flight else 1
        tokens = group.window - 1 + batches * self.max_num_batched_tokens
        return -(-min(tokens, self.max_model_len) // group.block_size) + 1


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step: `query` new tokens after `context` computed ones."""

    id: int
    query: int
    context: int


@dataclass(frozen=True)
class StepTime:
    """What one step takes.

    `device_us` is the time that the device is busy with it; `host_us` is what the
    host needs before it can launch it, which asynchronous scheduling hides behind
    the previous step; `output_us` is what the host needs after it. `launch_us` is
    how long the host launches: the device works meanwhile, and is not done before.
    `tokens` are its new tokens, by which it warms a device whose clock may give way
    (0: it does not): then `device_us` is what it takes in a long stream of such steps.

    Of a pipeline `device_us` is the first stage's, and `later_us` what each later
    stage's device takes.
    """

    device_us: float
    host_us: float = 0.0
    output_us: float = 0.0
    extrapolated: bool = False
    launch_us: float = 0.0
    tokens: int = 0
    later_us: tuple[float, ...] = ()


class StepTimer(Protocol):
    """Tells what a step takes.

    One with an attribute `clock` (`regression.clock.ClockResponse`, or None for a
    steady one) also tells how the device's clock gives way under load; one whose
    `launches_wait` is true, that a launch waits until the device is done with the step before.
    """

    def time(self, batch: Batch) -> StepTime:
        """The time of one step that computes `batch`."""
        ...


@dataclass(frozen=True)
class Batches:
    """Many batches as arrays: the requests of all of them, one batch after the other.

    `query` and `context` have one entry per request; the batch i holds the
    entries from `starts[i]` up to `starts[i + 1]`, the last one those to the end.
    """

    query: Integers
    context: Integers
    starts: Integers

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Batches:
        sizes = [batch.num_reqs for batch in batches]
        requests = [request for batch in batches for request in batch.requests]
        return cls(
            np.array([request.query for request in requests], np.int64),
            np.array([request.context for request in requests], np.int64),
            np.cumsum([0, *sizes[:-1]], dtype=np.int64),
        )

    @classmethod
    def decodes(cls, context: Integers, steps: int) -> Batches:
        """The next `steps` steps of decodes that hold `context` tokens now, none of them ending."""
        grown = context[None, :] + np.arange(steps)[:, None]
        starts = np.arange(steps, dtype=np.int64) * len(context)
        return cls(np.ones(grown.size, np.int64), grown.ravel().astype(np.int64), starts)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def num_reqs(self) -> Integers:
        """Requests of each batch."""
        return np.diff(self.starts, append=len(self.query))

    def total(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The sums per batch of `values`, one per request."""
        return np.add.reduceat(values, self.starts)


@dataclass(frozen=True)
class StepTimes:
    """`StepTime` of many steps, as arrays with one entry per step."""

    device_us: Numbers
    host_us: Numbers
    output_us: Numbers
    extrapolated: npt.NDArray[np.bool_]
    launch_us: Numbers | None = None  # None: nothing
    tokens: Integers | None = None  # None: nothing
    later_us: Numbers | None = None  # by (step, later stage); None: there is none


class ManyStepTimer(StepTimer, Protocol):
    """A timer that also tells many steps at once, for a scheduler that knows several ahead."""

    def times(self, batches: Batches) -> StepTimes:
        """The time of every one of `batches`; no batch may be empty."""
        ...


@dataclass(frozen=True)
class StepRecord:
    """One step: what was scheduled, when it began and when its tokens were out.

    `start_s` is when its scheduling began, `launched_s` when the host had handed
    it to the device, `ready_s` when its result had reached the host and `end_s`
    when the scheduler had taken note of it: its tokens are out. `preempted` are the
    requests that lost their KV blocks to it, in order of their ids.
    """

    start_s: float
    end_s: float
    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[int, ...] = ()
    launched_s: float | None = None
    ready_s: float | None = None
    time: StepTime | None = None  # None in a live run


@dataclass(frozen=True)
class RequestRecord:
    """One finished request: `token_s` holds when each output token came.

    `request.arrival_s` is when it really came. `admitted` is the number of calls
    of the scheduler before it was added to the queue: a run replayed with these
    has the same schedule, whatever a step takes.
    """

    request: ServingRequest
    scheduled_s: float  # start of the first step that computes a part of it
    token_s: tuple[float, ...]
    cached_tokens: int = 0  # prompt tokens found in the prefix cache when first scheduled
    preemptions: int = 0
    admitted: int = 0


@dataclass(frozen=True)
class Run:
    """A finished run, live or simulated: every step and every request, in order of their ids.

    Steps that compute nothing are left out. `steps` and `requests` may be
    sequences that make their records when they are asked for one:
    `columns.Steps` and `columns.Requests` hold the same as arrays.
    """

    steps: Sequence[StepRecord]
    requests: Sequence[RequestRecord]
    limits: ServingLimits | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # who ran it on what
