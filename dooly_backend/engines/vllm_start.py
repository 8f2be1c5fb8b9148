"""Starting vLLM's EngineCore with dummy weights, and undoing it, whatever happens."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dooly_backend.config import RunOptions
from dooly_backend.database.records import canonical_json
from dooly_backend.engines.kv_cache import kv_cache_bytes
from dooly_backend.engines.layers import layer_kinds, layers_needed, layers_represented
from dooly_backend.engines.parallel import Rank
from dooly_backend.engines.vllm_boot import (
    import_vllm,
    on_gpu,
    one_line,
    refuse_backend,
    remembering_bodies,
    shortened,
    showing_compiled_functions,
)
from dooly_backend.engines.vllm_configs import completed, register_config
from dooly_backend.engines.vllm_moe import graphs_routed
from dooly_backend.engines.vllm_quantization import neutral_scales
from dooly_backend.errors import DoolyError, EngineError

#: Share of the device's memory that must be free: several engines may share a device.
_LEAST_FREE = 0.05


@dataclass(frozen=True)
class Started:
    """An EngineCore that runs the first `layers` layers of `stage`.

    Closing `undo` shuts it down, ends the emulation of its group, and removes
    its files.
    """

    core: Any
    stage: range
    layers: int
    undo: ExitStack


def start(options: RunOptions, before_device: Callable[[], object]) -> Started:
    """Start vLLM. What fails leaves nothing behind.

    `before_device` is called when all is imported and vLLM has worked out its configuration.
        Raises EngineError, in one line, when vLLM refuses, and InputError when so
    few layers are asked for that they do not show every kind.
    """
    import_vllm(options.threads)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from dooly_backend.engines.parallel_vllm import emulated, groups_emulated, stage_layers

    rank = Rank.of(options)
    whole = completed(options.model.hf_config)
    kinds = layer_kinds(whole)
    stage = stage_layers(kinds, rank)
    layers = min(options.layers or layers_needed(kinds, stage), len(stage))
    layers_represented(kinds, layers, stage)  # refuses too few before anything starts
    with ExitStack() as undo:
        _leave_groups_at_the_end(undo)
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="dooly-model-")))
        (folder / "config.json").write_text(canonical_json(options.model.hf_config))
        arguments = _arguments(options, whole, folder, layers, stage)
        try:
            with (
                warnings.catch_warnings(),
                remembering_bodies(),
                showing_compiled_functions(),
                groups_emulated(rank),
            ):
                warnings.simplefilter("ignore")
                refuse_backend(options.backend)
                register_config(options.model.hf_config)
                arguments |= undo.enter_context(emulated(rank, stage, layers))
                if options.compiled:
                    undo.enter_context(graphs_routed())
                config = EngineArgs(**arguments).create_engine_config()
                import_module(config.parallel_config.worker_cls.rpartition(".")[0])
                before_device()
                core = EngineCore(config, Executor.get_class(config), log_stats=False)
        except DoolyError:
            raise
        except Exception as error:
            # vLLM raises whatever its layers raise; what the user can act on
            # is the message. The whole chain stays in __cause__.
            raise EngineError(f"vLLM refuses {options.model.name}: {one_line(error)}") from error
        undo.callback(core.shutdown)
        neutral_scales(core.model_executor.driver_worker.worker.model_runner.model)
        if options.execution_mode != "eager" and not options.compiled:
            never_replay(core.model_executor.driver_worker.worker.model_runner)
        return Started(core, stage, layers, undo.pop_all())


def graphs_of(config: Any) -> dict[str, Any]:
    """The mode of CUDA graphs of a booted engine, by its name, and the sizes that are captured."""
    compilation = config.compilation_config
    return {
        "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", None),
        "cudagraph_capture_sizes": list(compilation.cudagraph_capture_sizes or ()),
    }


def never_replay(runner: Any) -> None:
    """Let the runner prepare every step as for a CUDA graph, and launch its kernels itself.

    Attention metadata is built by whether there are graphs (`use_full_cuda_graph` of
    `vllm/v1/attention/backends/flash_attn.py`: it bounds the number of splits); a
    replayed graph would call no module. Raises EngineError for an unknown runner.
    """
    if (manager := getattr(runner, "cudagraph_manager", None)) is not None:  # V2 runner
        manager._candidates.clear()
    elif (dispatcher := getattr(runner, "cudagraph_dispatcher", None)) is not None:
        dispatcher.keys_initialized = False
    else:
        raise EngineError(
            f"{type(runner).__module__} has no CUDA graphs that are known: use the mode eager"
        )


def _leave_groups_at_the_end(undo: ExitStack) -> None:
    """Undo vLLM's process groups, unless another engine of this process has made them."""
    import torch
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if not torch.distributed.is_initialized():
        undo.callback(cleanup_dist_env_and_memory)


def _arguments(
    options: RunOptions, whole: Mapping[str, Any], folder: Path, layers: int, stage: range
) -> dict[str, Any]:
    """What EngineArgs is given, parallelism apart."""
    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": options.execution_mode == "eager",
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": kv_cache_bytes(whole, layers, on_gpu(), options.dtype),
        "hf_overrides": shortened(options.model.hf_config, whole, stage.start + layers),
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "kv_cache_dtype": options.kv_cache_dtype,
        "seed": 0,
    }
    if options.execution_mode != "eager" and not options.compiled:
        arguments["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if options.quantization:
        arguments["quantization"] = options.quantization
    if options.dtype:
        arguments["dtype"] = options.dtype
    if options.block_size:
        arguments["block_size"] = options.block_size
    if options.backend and options.backend != "CPU_ATTN":
        arguments["attention_backend"] = options.backend
    if on_gpu():
        # The KV cache is asked for by size; this is only what must be free at the start.
        arguments["gpu_memory_utilization"] = _LEAST_FREE
    return arguments
