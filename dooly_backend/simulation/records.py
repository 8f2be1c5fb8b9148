"""What a simulation takes and what it gives: requests in, steps and request times out.

The same records describe a live run, so that the two can be compared.
Times are seconds since the run began where a name ends in `_s`, microseconds in `_us`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dooly_backend.workload import Batch


@dataclass(frozen=True)
class ServingRequest:
    """One request of a workload: when it comes, and how long it is.

    Requests of one `prefix` begin with the same `prefix_tokens` tokens; all
    other tokens are their own.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: int | None = None
    prefix_tokens: int = 0


@dataclass(frozen=True)
class ServingLimits:
    """The engine's settings that decide a schedule, under vLLM's names."""

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
    the previous step; `output_us` is what the host needs after it.
    """

    device_us: float
    host_us: float = 0.0
    output_us: float = 0.0
    extrapolated: bool = False


class StepTimer(Protocol):
    """Tells what a step takes."""

    def time(self, batch: Batch) -> StepTime:
        """The time of one step that computes `batch`."""
        ...


@dataclass(frozen=True)
class StepRecord:
    """One step: what was scheduled, when it began and when its tokens were out."""

    start_s: float
    end_s: float
    scheduled: tuple[ScheduledRequest, ...]
    preempted: tuple[int, ...] = ()
    time: StepTime | None = None  # None in a live run


@dataclass(frozen=True)
class RequestRecord:
    """One finished request: `token_s` holds when each output token came."""

    request: ServingRequest
    scheduled_s: float  # first scheduled
    token_s: tuple[float, ...]
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Run:
    """A finished run, live or simulated: every step and every request."""

    steps: tuple[StepRecord, ...]
    requests: tuple[RequestRecord, ...]
