"""What Dooly needs of an engine that serves requests: the live truth beside a simulation.

Unlike `Engine`, which runs steps that the caller names, a `Server` schedules:
its own scheduler decides what every step computes. Its times are measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dooly_backend.config import ModelDescription
from dooly_backend.errors import InputError
from dooly_backend.simulation.records import KvCacheGroup, Run, ServingLimits, ServingRequest


class Arrivals(Protocol):
    """Hands out requests as they come: `simulation.arrivals` makes one from a workload."""

    def due(self, now_s: float, calls: int) -> Sequence[ServingRequest]:
        """The requests that came since the last call, in the order in which they join the queue.

        `calls` is how often the scheduler has been called.
        """
        ...

    def finished(self, request_id: int, now_s: float) -> None:
        """A request ended: in a closed loop another one comes."""
        ...

    def skip(self) -> float | None:
        """The engine is idle: when the next request comes, or None when none will.

        Where requests come by step, that one is due at once.
        """
        ...

    def everything(self) -> Sequence[ServingRequest]:
        """All requests, those to come among them."""
        ...


@dataclass(frozen=True)
class ServingOptions:
    """How a model is served. None leaves a setting to the engine's own default."""

    model: ModelDescription
    engine: str = "vllm"
    backend: str | None = None  # attention backend
    layers: int | None = None  # None: all
    tensor_parallel: int = 1
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None  # of the weights, by the engine
    block_size: int | None = None
    threads: int | None = None  # of a CPU engine
    eager: bool = False  # True: no compilation and no CUDA graphs
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_gpu_blocks: int | None = None
    kv_cache_gib: float | None = None
    async_scheduling: bool | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: int | None = None
    policy: str | None = None


class Server(ABC):
    """A booted engine that serves. Not thread-safe: one run at a time."""

    limits: ServingLimits
    #: Who serves: model, engine and its version, device, settings.
    about: Mapping[str, Any]

    @abstractmethod
    def serve(self, arrivals: Arrivals) -> Run:
        """Serve the requests as they come, until all have ended.

        Raises InputError for a request that is longer than the engine takes.
        """

    @abstractmethod
    def forget(self) -> None:
        """Empty the prefix cache, as if nothing had been served. Raises EngineError."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine's processes and memory."""

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def boot_server(options: ServingOptions) -> Server:
    """Start `options.engine` with dummy weights.

    Raises InputError for an engine that Dooly does not know, EngineError when
    it is not installed or refuses the options.
    """
    if options.engine == "vllm":
        from dooly_backend.engines.vllm_serving import VllmServer

        return VllmServer.boot(options)
    raise InputError(f"unknown engine {options.engine!r}: use vllm")


#: What one of these is named after is in blocks as full attention is.
_FULL = ("FullAttentionSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs")
_WINDOW = ("SlidingWindowSpec", "SlidingWindowMLASpec")


def kv_group(kind: str, block_size: int, window: int | None, caches: bool) -> KvCacheGroup:
    """A group of the engine's cache, by the name of its spec.

    `caches` says whether prefixes are cached.
    """
    if kind in _FULL or (kind == "MambaSpec" and not caches):
        return KvCacheGroup(block_size)
    if kind in _WINDOW and window is not None:
        return KvCacheGroup(block_size, window)
    return KvCacheGroup(block_size, window, unmodelled=kind)


def refuse_limits(limits: ServingLimits) -> None:
    """Raise InputError for limits that no engine takes."""
    for name in (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "num_gpu_blocks",
        "block_size",
        "pipeline_parallel",
    ):
        if getattr(limits, name) < 1:
            raise InputError(f"{name} is {getattr(limits, name)}: give one or more")
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise InputError(
            f"max_num_batched_tokens {limits.max_num_batched_tokens} is less than max_num_seqs "
            f"{limits.max_num_seqs}: every running request needs a token of a step"
        )
    if not limits.enable_chunked_prefill and limits.max_num_batched_tokens < limits.max_model_len:
        raise InputError(
            f"without chunked prefill max_num_batched_tokens {limits.max_num_batched_tokens} must "
            f"not be less than max_model_len {limits.max_model_len}: a prompt is one step"
        )
    if limits.policy not in ("fcfs", "priority"):
        raise InputError(f"unknown policy {limits.policy!r}: fcfs or priority")
    if limits.long_prefill_token_threshold < 0 or not 0 <= limits.watermark < 1:
        raise InputError(
            "long_prefill_token_threshold is 0 or more, watermark a part of the blocks below 1"
        )
    _refuse_groups(limits)


def _refuse_groups(limits: ServingLimits) -> None:
    for group in limits.kv_groups:
        if group.unmodelled:
            without = " with prefix caching: give --no-enable-prefix-caching"
            raise InputError(
                f"the schedule of a KV cache with {group.unmodelled} is not modelled"
                + without * (group.unmodelled == "MambaSpec")
            )
        if group.block_size < 1 or (group.window is not None and group.window < 2):
            raise InputError(f"a KV cache group of {group}: blocks hold 1 token, windows 2 or more")
    sizes = {group.block_size for group in limits.kv_groups}
    if limits.enable_prefix_caching and not sizes <= {limits.block_size}:
        raise InputError(
            f"prefix caching with blocks of {', '.join(map(str, sorted(sizes)))} tokens beside "
            "each other is not modelled: simulate without it (--no-enable-prefix-caching)"
        )


def refuse_too_long(requests: Sequence[ServingRequest], limits: ServingLimits) -> None:
    """Raise InputError for a request that the limits have no room for."""
    for request in requests:
        tokens = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise InputError(f"request {request.id} has no prompt or no output tokens")
        if tokens > limits.max_model_len:
            raise InputError(
                f"request {request.id} has {tokens} tokens with its output and the engine takes "
                f"{limits.max_model_len}: shorten it or raise max_model_len"
            )
        # The last token is sampled and never computed; block 0 is the null block.
        needed = sum(
            min(-(-(tokens - 1) // group.block_size), limits.most_blocks(group))
            for group in limits.groups
        )
        if needed > limits.num_gpu_blocks - 1:
            raise InputError(
                f"request {request.id} has {tokens} tokens, which take {needed} blocks, and the KV "
                f"cache holds {limits.num_gpu_blocks - 1}: give it more blocks"
            )
