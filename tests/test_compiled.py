"""Functions that the engine compiles stay compiled under the tracer, and are one call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dooly_backend.engines.base import CapturedCall
from dooly_backend.engines.compiled import showing_compiled, uninterrupted
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.operations.capture import _OperationRecorder
from dooly_backend.tracing.labels import Label
from dooly_backend.tracing.modes import DispatchTracer, FunctionTracer, Labeller

NAME = "compiled::test_compiled_scaled"


class Counted:
    """A compiler that counts how often what it made runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def scaled(x: Any, weight: Any, by: int) -> Any:
    return (x * weight).mul(by)


def halved(x: Any) -> Any:
    return x / 2


class Block(torch.nn.Module):
    """One compiled call between two that the dispatcher sees."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(6))
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x + 1, self.weight, by=len(self.weight.shape) + 2).relu()


@pytest.fixture
def counted() -> Counted:
    return Counted()


@pytest.fixture
def block(counted: Counted) -> Block:
    torch._dynamo.reset()
    with showing_compiled("test_compiled"):
        return Block(torch.compile(backend=counted)(scaled))


def ran(counted: Counted, block: Block, rows: int = 4) -> int:
    """How often compiled code runs in one call of `block`."""
    before = counted.runs
    with torch.inference_mode():
        block(torch.ones(rows, 6))
    return counted.runs - before


def test_a_mode_that_torch_does_not_know_ends_it_for_good(counted: Counted, block: Block) -> None:
    """The reason for all this: should torch change, `engines/compiled.py` can go."""

    class Plain(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    assert ran(counted, block) == 1
    with Plain(), torch.inference_mode():
        block(torch.ones(4, 6))
    assert ran(counted, block) == 0


def traced(block: Block, label: bool) -> DispatchTracer:
    stack = ModuleStack({"": block})
    labeller = Labeller({6: Label.of("model_config", 6)}, {5: Label.of("num_toks", 5)})
    functions = FunctionTracer(labeller) if label else None
    tracer = DispatchTracer(stack, labeller, {}, functions, label=label)
    with torch.inference_mode():
        x = torch.ones(5, 6)
        with stack.tracking(), tracer.active():
            block(x)
    return tracer


@pytest.mark.parametrize("label", [False, True], ids=["plain", "labelled"])
def test_a_traced_function_is_one_operation_and_stays_compiled(
    counted: Counted, block: Block, label: bool
) -> None:
    assert ran(counted, block) == 1
    operations = traced(block, label).operations
    assert [op.name for op in operations] == ["aten::add.Tensor", NAME, "aten::relu.default"]
    assert counted.runs == 2  # in the traced pass, too
    assert ran(counted, block) == 1
    call = operations[1]
    assert [[dim.size for dim in spec.dims] for spec in call.inputs] == [[5, 6], [6]]
    assert [[dim.size for dim in spec.dims] for spec in call.outputs] == [[5, 6]]
    assert [dim.size for dim in call.scalars] == [3]
    if label:
        assert [str(dim.label.name) for dim in call.outputs[0].dims] == ["num_toks", "model_config"]


def test_its_first_call_may_be_a_traced_one(counted: Counted, block: Block) -> None:
    assert NAME in [op.name for op in traced(block, label=True).operations]
    assert ran(counted, block, rows=5) == 1


def test_its_call_is_captured_with_its_ordinal(counted: Counted, block: Block) -> None:
    stack = ModuleStack({"": block})
    recorder = _OperationRecorder(stack, frozenset({("", 1), ("", 2)}))
    with torch.inference_mode(), stack.tracking(), recorder:
        whole = block(torch.ones(4, 6))
    calls: list[CapturedCall] = recorder.calls
    assert [call.ordinal for call in calls] == [1, 2]
    with torch.inference_mode():
        assert torch.equal(calls[0]().relu(), whole)
    assert counted.runs == 2  # in the step and again
    assert torch.equal(calls[1](), whole)


def test_modes_are_back_after_a_compiled_call(counted: Counted, block: Block) -> None:
    stack = ModuleStack({"": block})
    tracer = DispatchTracer(stack, Labeller({}), {}, FunctionTracer(Labeller({})), label=True)
    with tracer.active():
        result = uninterrupted(lambda x: x + 1, (torch.ones(3),), {})
        assert isinstance(result.shape[0], int)
        result.neg()
    assert [op.name for op in tracer.operations][-1] == "aten::neg.default"
    assert "aten::add.Tensor" not in [op.name for op in tracer.operations]


def test_others_are_left_alone() -> None:
    """Functions of other packages, methods, and what is compiled later."""
    compile = torch.compile
    with showing_compiled("vllm"):
        made = torch.compile(halved, backend="eager")
    assert type(made) is type(compile(halved, backend="eager"))
    assert made.__code__ is compile(halved, backend="eager").__code__
    assert torch.compile is compile
