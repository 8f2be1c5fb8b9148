"""Ranks of parallel groups, one engine after the other: one line of JSON a rank, for the tests.

    python parallel_ranks.py '{"hf_config": {...}, "tensor_parallel": 2}' ...

Each argument is a JSON object of run options; "hf_config" is the model's
configuration; with "fails" the engine's constructor fails once vLLM runs. The
last line tells whether the emulation left vLLM and torch as they were.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine_helpers import BF16_MATRIX_PRODUCTS

from dooly_backend.config import ModelDescription, RunOptions
from dooly_backend.engines import Engine, boot
from dooly_backend.engines.vllm_instance import VllmInstance
from dooly_backend.errors import EngineError
from dooly_backend.operations.callgraph import occurrences, signatures
from dooly_backend.operations.cover import recorded, step_cover
from dooly_backend.operations.runnable import resolve
from dooly_backend.operations.tree import forest, is_collective
from dooly_backend.tracing.trace import Operation, TensorSpec
from dooly_backend.tracing.tracer import trace_model
from dooly_backend.workload import Batch


def facts(options: RunOptions) -> dict[str, Any]:
    """What the tests look at, of one rank."""
    with boot(options) as engine:
        trace = trace_model(engine)
        runnable = resolve(trace, engine)
        signed = signatures(trace, runnable, engine)
        nodes = [node for root in forest(trace) for node in root.walk()]
        cover = step_cover(recorded(engine, Batch.parse("1x20+30,4x1+60")), runnable.entries)
        steps: list[int] = []
        engine.live_steps(
            Batch.decode(3, 40) + Batch.prefill(20), 3, lambda step: count(step, steps)
        )
        return {
            "stage": [engine.stage.start, engine.stage.stop],
            "built": engine.num_layers,
            "tokens": trace.num_tokens,
            "requests": trace.num_reqs,
            "accuracy": trace.check.accuracy,
            "predicted": trace.check.predicted == trace.check.dimensions,
            "unlabelled": len(trace.unlabelled()),
            "roots": [m.path for m in trace.modules if m.caller is None],
            "modules": sorted({m.path for m in trace.modules}),
            "parameters": {
                name: list(p.shape)
                for name, p in engine._runner.model.named_parameters()
                if p.numel()  # CPU kernels hold linear weights packed, out of sight
            },
            "outputs": {  # columns of every linear layer
                op.path: (op.outputs or op.inputs)[0].dims[-1].size  # oneDNN's writes to an input
                for op in trace.operations
                if op.name in BF16_MATRIX_PRODUCTS
            },
            "collectives": Counter(text(op) for op in trace.operations if is_collective(op)),
            "timed": sorted(
                {op.name for node in nodes for op in node.kernels if is_collective(op)}
                | {entry.name for entry in runnable.entries if "dooly::" in entry.name}
            ),
            "queries": next(
                [d.size for d in op.inputs[0].dims]
                for op in trace.operations
                if op.name.startswith("vllm::unified_attention_with_output")
            ),
            "occurrences": [
                [o.path, o.module_class, o.count, list(o.layers), o.signature.hash]
                for o in occurrences(engine, signed)
            ],
            "degrees": [
                engine.configuration.tensor_parallel,
                engine.configuration.pipeline_parallel,
            ],
            "configuration": engine.configuration.digest,
            "cover": [cover.kernels, cover.is_exact],
            "steps": len(steps),
            "fired": fired(engine),
        }


def fired(engine: Engine) -> dict[str, Any]:
    """The experts that the kernel of each MoE layer is handed, by how many shall fire."""
    if not engine.moe:
        return {}
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    seen: list[list[int]] = []
    apply = CPUUnquantizedExperts.apply

    def looks(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(sorted(set(kwargs["topk_ids"].flatten().tolist())))
        apply(self, *args, **kwargs)

    found: dict[str, Any] = {}
    owned = min(layer.experts for layer in engine.moe.values())
    for how in range(1, owned + 1):
        with engine.routed(how), patch.object(CPUUnquantizedExperts, "apply", looks):
            engine.step(Batch.prefill(20))
        found[str(how)] = list(seen)
        seen.clear()
    try:
        with engine.routed(owned + 1):
            pass
    except EngineError as error:
        found["more"] = str(error)
    return found


def failing(options: RunOptions, before: dict[str, Any]) -> dict[str, Any]:
    """What is left of an engine whose constructor fails when vLLM has started."""
    folders = set(Path(tempfile.gettempdir()).glob("dooly-model-*"))
    started: list[Any] = []

    def fails(self: VllmInstance, _: RunOptions) -> None:
        started.append(self._core)
        raise RuntimeError("no configuration")

    from vllm.v1.engine.core import EngineCore

    stopped: list[Any] = []
    shutdown = EngineCore.shutdown

    def stops(core: Any) -> None:
        stopped.append(core)
        shutdown(core)

    with (
        patch.object(VllmInstance, "_configuration", fails),
        patch.object(EngineCore, "shutdown", stops),
    ):
        try:
            boot(options)
        except RuntimeError as error:
            message = str(error)
    return {
        "error": message,
        "folders": len(set(Path(tempfile.gettempdir()).glob("dooly-model-*")) - folders),
        "left behind": left_behind(before),
        "shut down": len(started) == 1 and stopped == started,
    }


def count(step: Any, steps: list[int]) -> None:
    step()
    steps.append(1)


def text(op: Operation) -> str:
    """``dooly::all_gather.tp 9:num_reqs,512:model_config -> ...``."""

    def sizes(tensors: tuple[TensorSpec, ...]) -> str:
        return ";".join(",".join(f"{d.size}:{d.label.name}" for d in t.dims) for t in tensors)

    return f"{op.name} {sizes(op.inputs)} -> {sizes(op.outputs)}"


def left_behind(before: dict[str, Any]) -> list[str]:
    return sorted(name for name, value in places().items() if value is not before[name])


def places() -> dict[str, Any]:
    """What the emulation replaces while an engine starts or runs."""
    import torch
    from vllm import envs, forward_context
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    return {
        "GroupCoordinator": parallel_state.GroupCoordinator,
        "in_the_same_node_as": parallel_state.in_the_same_node_as,
        "new_group": torch.distributed.new_group,
        "DPMetadata.make": forward_context.DPMetadata.make,
        "experts": cpu_moe.CPUUnquantizedExperts.apply,
        "VLLM_PP_LAYER_PARTITION": vars(envs).get("VLLM_PP_LAYER_PARTITION"),
        "world": torch.distributed.is_initialized(),
    }


if __name__ == "__main__":
    before: dict[str, Any] | None = None
    for argument in sys.argv[1:]:
        settings = json.loads(argument)
        model = ModelDescription(name="tiny", hf_config=settings.pop("hf_config"))
        fails = settings.pop("fails", False)
        options = RunOptions(model=model, threads=1, **settings)
        try:
            found = failing(options, before or {}) if fails else facts(options)
        except EngineError as error:
            found = {"error": str(error)}
        before = before or places()
        sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.write(json.dumps(left_behind(before or places())) + "\n")
