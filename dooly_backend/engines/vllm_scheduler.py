"""vLLM's own scheduler without a model: its EngineCore, an executor that computes nothing, and
a virtual clock.

The clock's rule follows the two step functions of `vllm/v1/engine/core.py`, the
same in 0.25.1 (lines 479 and 519) and 0.32.0 (694 and 740). The host does one
thing at a time; the device runs steps in the order in which they are launched.

- Both call `schedule`, then `execute_model` and `sample_tokens`: scheduling begins
  at `start`, the first kernel goes out at `start + host`, and at
  `launched = start + host + launch` the whole step is with the device.
- The device begins when it is free, and is not done before all is launched:
  `ready = max(max(start + host, ready before) + device, launched)`. What a step
  takes of the device may depend on those before it (`device_clock.py`).
- A backend that plans a step by numbers of the device (FlashInfer) waits for it first:
  `launched = max(start + host, ready before) + launch`.
- `step` then waits for `future.result()` and calls `update_from_output`:
  `end = ready + output`, and the next step is scheduled at `end`.
- `step_with_batch_queue` (asynchronous scheduling, two batches under way) returns
  while the queue has room, so the next step is scheduled at `launched`. Else it pops
  the oldest step and waits for that: `end(n-1) = max(launched(n), ready(n-1)) + output`,
  and step n+1 is scheduled at `end(n-1)`: host work hides behind the device.
- A pipeline of p stages has the same loop with p batches under way, p + 1 with
  asynchronous scheduling. The device is its first stage then; the result is there
  when the last one is done (`simulation/pipeline.py`).
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from dooly_backend.config import ModelDescription
from dooly_backend.engines.prompts import prompt
from dooly_backend.engines.serving import Arrivals, ServingOptions, refuse_too_long
from dooly_backend.engines.vllm_boot import import_vllm, one_line
from dooly_backend.engines.vllm_drive import Journal, drive, scheduled_requests, vllm_request
from dooly_backend.engines.vllm_serving import engine_config, limits_of
from dooly_backend.errors import DoolyError, EngineError, InputError
from dooly_backend.regression.clock import ClockResponse
from dooly_backend.simulation.device_clock import DeviceClock
from dooly_backend.simulation.pipeline import LaterStages
from dooly_backend.simulation.records import (
    KvCacheGroup,
    Run,
    ServingLimits,
    StepTime,
    StepTimer,
)
from dooly_backend.workload import Batch, Request

_VOCAB_SIZE = 32000


class VirtualClock:
    """Time that passes by the rule above; `timer` says what a step takes."""

    def __init__(self, timer: StepTimer, clock: ClockResponse | None = None) -> None:
        self._timer = timer
        self._launches_wait = getattr(timer, "launches_wait", False)
        self._clock = DeviceClock(clock) if clock else None
        self._now = 0.0
        self._device_free = 0.0
        self._later = LaterStages(clock)
        self._under_way: dict[int, tuple[float, float]] = {}  # ready, and what the output takes

    def now(self) -> float:
        return self._now

    def wait(self, until_s: float) -> None:
        self._now = max(self._now, until_s)

    def scheduled(self, output: Any) -> StepTime | None:
        batch = Batch(tuple(Request(r.query, r.context) for r in scheduled_requests(output)))
        time = self._timer.time(batch)
        self._now += time.host_us / 1e6
        begin = max(self._device_free, self._now)
        if self._launches_wait:
            self._now = begin
        self._now += time.launch_us / 1e6
        took = time.device_us / 1e6
        if self._clock:
            took = self._clock.step(begin, took, time.tokens)
            time = replace(time, device_us=took * 1e6)
        self._device_free = max(begin + took, self._now)
        later = [us / 1e6 for us in time.later_us]
        done = self._later.done_s(self._device_free, later, time.tokens)
        self._under_way[id(output)] = done, time.output_us / 1e6
        return time

    def awaited(self, output: Any) -> None:
        ready, _ = self._under_way[id(output)]
        self._now = max(self._now, ready)

    def noted(self, output: Any) -> None:
        _, output_s = self._under_way.pop(id(output))
        self._now += output_s


class EngineScheduler:
    """The scheduler that vLLM makes for `limits`. Each run begins with an empty prefix cache."""

    def __init__(self, limits: ServingLimits, threads: int | None = None) -> None:
        import_vllm(threads)
        from vllm.v1.engine.core import EngineCore

        self._folder = tempfile.TemporaryDirectory(prefix="dooly-model-")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = _config(limits, self._folder.name)
                with _runner_of(config, limits):
                    executor = _executor_class(limits.groups)
                    self._core = EngineCore(config, executor, log_stats=False)
        except DoolyError:
            self._folder.cleanup()
            raise
        except Exception as error:
            self._folder.cleanup()
            raise EngineError(f"vLLM refuses these limits: {one_line(error)}") from error
        self.limits = limits_of(self._core)
        if replace(self.limits, version=limits.version) != limits:
            self.close()
            raise InputError(f"vLLM makes {self.limits} of {limits}: choose limits that it takes")

    @property
    def core(self) -> Any:
        """VLLM's EngineCore, whose executor computes nothing."""
        return self._core

    def run(self, arrivals: Arrivals, timer: StepTimer, clock: ClockResponse | None = None) -> Run:
        """Schedule the requests as they come, until all have ended; `clock` is the device's.

        Raises InputError.
        """
        requests = arrivals.everything()
        refuse_too_long(requests, self.limits)
        if not self._core.reset_prefix_cache():
            raise EngineError("vLLM does not empty its prefix cache: requests are in progress")
        prepared = {
            request.id: vllm_request(self._core, request, prompt(request, _VOCAB_SIZE))
            for request in requests
        }
        journal = Journal(VirtualClock(timer, clock))
        drive(self._core, arrivals, prepared, journal)
        steps, records = journal.records()
        about = {"engine": f"vllm {self.limits.version} scheduler"}
        return Run(steps, records, self.limits, about)

    def close(self) -> None:
        self._core.scheduler.shutdown()
        self._folder.cleanup()

    def __enter__(self) -> EngineScheduler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _config(limits: ServingLimits, folder: str) -> Any:
    """VLLM's configuration with `limits`, for a model that is never made.

    What the platform of this host forces is set back: a CPU turns asynchronous
    scheduling off.
    """
    model = ModelDescription(name="none", hf_config=_hf_config(limits.max_model_len))
    options = ServingOptions(
        model=model,
        eager=True,
        block_size=limits.block_size,
        kv_cache_gib=1.0,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        num_gpu_blocks=limits.num_gpu_blocks,
        async_scheduling=limits.async_scheduling,
        enable_prefix_caching=limits.enable_prefix_caching,
        enable_chunked_prefill=limits.enable_chunked_prefill,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        policy=limits.policy,
    )
    config = engine_config(options, folder)
    config.cache_config.block_size = limits.block_size
    scheduler = config.scheduler_config
    scheduler.watermark = limits.watermark
    scheduler.scheduler_reserve_full_isl = limits.scheduler_reserve_full_isl
    config.parallel_config.pipeline_parallel_size = limits.pipeline_parallel
    config.parallel_config.world_size = limits.pipeline_parallel
    return config


@contextmanager
def _runner_of(config: Any, limits: ServingLimits) -> Iterator[None]:
    """Let vLLM take the V2 model runner, the one that runs pipelines asynchronously."""
    if limits.pipeline_parallel == 1 or not limits.async_scheduling:
        yield
        return
    with patch.object(type(config), "use_v2_model_runner", True):
        yield


def _hf_config(max_model_len: int) -> dict[str, Any]:
    """A Llama of one layer: every layer of full attention is scheduled the same."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": _VOCAB_SIZE,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }


def _specs(groups: Sequence[KvCacheGroup]) -> dict[str, Any]:
    """Cache specs of a model with one layer per group, in their order."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    specs: dict[str, Any] = {}
    for index, group in enumerate(groups):
        common = {
            "block_size": group.block_size,
            "num_kv_heads": 1,
            "head_size": 64,
            "dtype": torch.bfloat16,
        }
        if group.window is None:
            specs[f"layer.{index}"] = FullAttentionSpec(**common)
        else:
            specs[f"layer.{index}"] = SlidingWindowSpec(**common, sliding_window=group.window)
    return specs


def _executor_class(groups: Sequence[KvCacheGroup]) -> Any:
    """An executor for EngineCore that computes nothing; a class is made when vLLM is there."""
    from vllm.v1.executor import Executor
    from vllm.v1.outputs import ModelRunnerOutput

    class NoExecutor(Executor):
        """Answers what EngineCore asks at its start, and samples a token where one is due."""

        def _init_executor(self) -> None:
            self._tokens: dict[str, int] = {}  # of every request that is under way
            self._sampled: Any = None

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
            answers = {
                "get_kv_cache_spec": [_specs(groups)],
                "determine_available_memory": [1 << 40],
                "get_supported_kv_cache_layouts": [["NHD"]],
                "compile_or_warm_up_model": [],
            }
            return answers.get(method, [None])

        def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
            self._sampled = self._sample(scheduler_output)
            # None asks for `sample_tokens`; an empty step is over at once.
            empty = not scheduler_output.total_num_scheduled_tokens
            return _done(self._sampled if empty else None, non_block)

        def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
            return _done(self._sampled, non_block)

        def _sample(self, output: Any) -> ModelRunnerOutput:
            """One token for every request whose known tokens are all computed."""
            for name in output.finished_req_ids:
                self._tokens.pop(name, None)
            context = {}
            for new in output.scheduled_new_reqs:
                # The V2 runner's list has the output of a resumed request, too.
                known = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
                self._tokens[new.req_id] = max(len(known), self._tokens.get(new.req_id, 0))
                context[new.req_id] = new.num_computed_tokens
            cached = output.scheduled_cached_reqs
            context.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            names = list(output.num_scheduled_tokens)
            sampled = []
            for name in names:
                computed = context[name] + output.num_scheduled_tokens[name]
                due = computed >= self._tokens[name]
                if due:
                    self._tokens[name] += 1
                # Output of two requests is never equal, so that none hits the other's blocks.
                sampled.append([int(name) % _VOCAB_SIZE] if due else [])
            return ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            )

        def check_health(self) -> None:
            pass

    return NoExecutor


def _done(result: Any, non_block: bool) -> Any:
    if not non_block:
        return result
    future: Future[Any] = Future()
    future.set_result(result)
    return future
