"""What the tests of a real engine share: its state, passes, and the live outputs of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dooly_backend.engines.base import copied, hooks
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.operations.tree import Node, forest
from dooly_backend.tracing.trace import STEP, Operation, Trace

LAYERS = 3  # of the session's engine
#: The matrix product of a linear layer in float32, the session's dtype; it writes to an argument.
MATRIX_PRODUCT = "_C::onednn_mm.default"
#: And in bf16: vLLM's CPU build gives it to oneDNN where the processor has AVX-512, and to torch
#: where it has not (as `vllm/platforms/cpu.py` asks); with AMX small weights get a kernel of
#: their own (`dispatch_cpu_unquantized_gemm`), which writes to an argument, too.
BF16_MATRIX_PRODUCTS = (MATRIX_PRODUCT, "aten::linear.default", "_C::weight_packed_linear.default")
ATTENTION = tuple(f"model.layers.{i}.self_attn.attn" for i in range(LAYERS))


def state(engine: VllmEngine) -> tuple[int, int, int]:
    """Free KV blocks, requests that the runner knows, requests in its batch."""
    runner = engine._runner
    return len(engine._steps._free), len(runner.requests), runner.input_batch.num_reqs


def inside_modules(trace: Trace) -> list[Operation]:
    return [op for op in trace.operations if op.path != STEP]


def nodes(trace: Trace) -> list[Node]:
    """Every module call of a pass."""
    return [node for root in forest(trace) for node in root.walk()]


def leaf_paths(trace: Trace) -> list[str]:
    """Paths of the module calls that call no other, in order."""
    return [node.path for node in nodes(trace) if not node.children]


@contextmanager
def live_outputs(engine: VllmEngine, paths: frozenset[str]) -> Iterator[list[tuple[str, Any]]]:
    """Paths and copies of what the modules at `paths` return while the block runs."""
    import torch.nn.modules.module as torch_module

    stack = ModuleStack(engine.modules)
    found: list[tuple[str, Any]] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        if stack.path in paths:
            found.append((stack.path, copied(output)))

    # Before the stack's own hook, which leaves the module.
    handle = torch_module.register_module_forward_hook(keep)
    with hooks([handle]), stack.tracking():
        yield found
