"""Kernels that a module launches past the dispatcher: they lie under an entry that runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dooly_backend.engines.launches import kernel_name, showing_launches
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.engines.vllm_sampler import Sampler
from dooly_backend.errors import TraceError
from dooly_backend.operations.callgraph import signatures
from dooly_backend.operations.capture import captured
from dooly_backend.operations.cover import recorded, step_cover
from dooly_backend.operations.runnable import LAUNCHES, RunnableSet, check_cover, resolve
from dooly_backend.operations.signature import attributes
from dooly_backend.operations.tree import forest
from dooly_backend.tracing.differential import Pass, check
from dooly_backend.tracing.labels import Dim, Label
from dooly_backend.tracing.modes import DispatchTracer, Labeller
from dooly_backend.tracing.trace import LAUNCHED, Affine, Operation, TensorSpec, Trace
from dooly_backend.tracing.tracer import trace_model
from dooly_backend.workload import Batch
from integration.gpu import coverage


class Jitted:
    """What of Triton's JITFunction launching needs: it doubles its argument in place."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.runs = 0

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not warmup:
            self.runs += 1
            with torch.utils._python_dispatch._disable_current_modes():  # no operation of torch's
                self.fn(*args)


class Tuned(Jitted):
    """As Triton's Autotuner: every launch tries two configurations first."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(3):
            self.fn.run(*args, **kwargs)  # type: ignore[attr-defined]


def _double(x: Any) -> None:
    x.mul_(2)


@pytest.fixture
def jitted(monkeypatch: pytest.MonkeyPatch) -> Jitted:
    """A kernel of a triton that is this file's."""
    fakes = {"jit": {"JITFunction": Jitted}, "autotuner": {"Autotuner": Tuned}}
    for name, classes in {**fakes, "interpreter": {}}.items():
        monkeypatch.setitem(sys.modules, f"triton.runtime.{name}", SimpleNamespace(**classes))
    return Jitted(_double)


class Block(torch.nn.Module):
    """Runs `body` between two operations that the dispatcher sees."""

    def __init__(self, body: Callable[[Any], Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Any) -> Any:
        y = x + 1
        self.body(y)
        return y.relu()


def traced(block: torch.nn.Module, kind: type[DispatchTracer] = DispatchTracer) -> list[Operation]:
    stack = ModuleStack(dict(block.named_modules()))
    tracer = kind(stack, Labeller({}), {}, None, label=False)
    x = torch.ones(5, 6)
    with torch.inference_mode(), stack.tracking(), tracer.recording():
        block(x)
    return tracer.operations


def names(operations: list[Operation]) -> list[str]:
    return [op.name for op in operations]


AROUND = ["aten::add.Tensor", "launched::_double", "aten::relu.default"]

# -- seeing them ------------------------------------------------------------------


def test_a_launch_is_recorded_at_its_place(jitted: Jitted) -> None:
    operations = traced(Block(lambda x: jitted[(1,)](x)))
    assert names(operations) == AROUND
    launch = operations[1]
    assert launch.is_launch
    assert (launch.call, launch.path, launch.parent, list(launch.dims())) == (0, "", None, [])
    assert [op.index for op in operations] == [0, 1, 2]
    assert jitted.runs == 1


def test_every_launch_of_a_module_counts_but_no_warm_up(jitted: Jitted) -> None:
    def body(x: Any) -> None:
        jitted.run(x, grid=(1,), warmup=True)
        jitted[(1,)](x)
        jitted[(1,)](x)

    assert names(traced(Block(body))).count("launched::_double") == 2


def test_what_a_tuner_tries_is_one_launch(jitted: Jitted) -> None:
    tuned = Tuned(jitted)  # type: ignore[arg-type]
    assert kernel_name(tuned) == "_double"
    assert names(traced(Block(lambda x: tuned[(1,)](x)))) == AROUND
    assert jitted.runs == 3


def test_a_launch_that_fails_does_not_hide_the_next(jitted: Jitted) -> None:
    def body(x: Any) -> None:
        with pytest.raises(AttributeError):
            jitted[(1,)](None)
        jitted[(1,)](x)

    assert names(traced(Block(body))).count("launched::_double") == 2


def test_outside_every_module_it_is_the_steps_own(jitted: Jitted) -> None:
    stack = ModuleStack({})
    tracer = DispatchTracer(stack, Labeller({}), {}, None, label=False)
    with stack.tracking(), tracer.recording():
        jitted[(1,)](torch.ones(3))
    assert "launched::_double" not in names(tracer.operations)


def test_triton_is_left_as_it_was(jitted: Jitted, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Jitted.run
    with showing_launches():
        assert Jitted.run is not before
        jitted[(1,)](torch.ones(3))  # with no mode on: it runs, and nobody is told
        with pytest.raises(AttributeError):
            jitted[(1,)](None)
    assert Jitted.run is before
    assert jitted.runs == 2
    for name in ("jit", "interpreter", "autotuner"):
        monkeypatch.delitem(sys.modules, f"triton.runtime.{name}")
    with showing_launches():  # as where there is no triton
        assert Jitted.run is before


# -- inside operations of the dispatcher --------------------------------------------

LIBRARY = torch.library.Library("dooly_test_launches", "DEF")
LIBRARY.define("op(Tensor x) -> Tensor")
BODY: list[Callable[[Any], Any]] = [lambda x: None]


def _op(x: Any) -> Any:
    BODY[0](x)
    return x.clone()


LIBRARY.impl("op", _op, "CPU")


class Caller(torch.nn.Module):
    """Calls a custom operation, directly or as vLLM's whose bodies are entered, and `inner`."""

    def __init__(self, inner: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return torch.ops.dooly_test_launches.op(x)


def test_inside_an_operation_it_is_that_operations(jitted: Jitted) -> None:
    BODY[0] = lambda x: jitted[(1,)](x)
    assert names(traced(Caller())) == ["dooly_test_launches::op.default"]
    assert jitted.runs == 1


class Entering(DispatchTracer):
    """Enters the body of this file's operation as that of one of vLLM's."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = f"{func.namespace}::{func.__name__}"
        if func.namespace != "dooly_test_launches":
            return super().__torch_dispatch__(func, types, args, kwargs)
        return self._recorded(
            name, args, {}, lambda index, call: self._enter(index, call, _op, args, {})
        )


@pytest.mark.parametrize("through_a_module", [False, True])
def test_in_the_body_of_one_it_is_the_modules_that_runs_there(
    jitted: Jitted, through_a_module: bool
) -> None:
    """The operation covers its body; a module called there must not be divided without it."""
    caller = Caller(Block(lambda x: jitted[(1,)](x)))
    BODY[0] = caller.inner if through_a_module else lambda x: jitted[(1,)](x)  # type: ignore
    found = [(op.path, op.name, op.parent) for op in traced(caller, Entering)]
    if not through_a_module:
        assert found == [
            ("", "dooly_test_launches::op.default", None),
            ("", "aten::clone.default", 0),
        ]
        return
    assert ("inner", "launched::_double", 0) in found
    assert len([name for _, name, _ in found if name == "launched::_double"]) == 1


# -- triton itself ------------------------------------------------------------------


def test_kernels_of_triton_itself() -> None:
    """Where it is installed: its interpreter on a CPU, and its tuner."""
    pytest.importorskip("triton")
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def _add_one(x: Any, n: Any, B: tl.constexpr) -> None:
        i = tl.arange(0, B)
        tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

    kernel = InterpretedFunction(_add_one)
    seen = torch.zeros(5)

    def body(y: Any) -> None:
        kernel[(1,)](seen, 5, B=8)

    assert names(traced(Block(body))).count("launched::_add_one") == 1
    assert seen.tolist() == [1.0] * 5
    assert kernel_name(JITFunction(_add_one)) == "_add_one"


def test_tuners_of_triton_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    runs: list[Any] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **kwargs: runs.append(kwargs))

    def _tuned(x: Any, BLOCK: Any) -> None:
        pass

    def bench(call: Callable[[], Any], quantiles: Any) -> list[float]:
        call()
        return [1.0, 1.0, 1.0]

    configs = [triton.Config({"BLOCK": size}) for size in (16, 32)]
    kernel = triton.autotune(configs, key=[], do_bench=bench)(JITFunction(_tuned))
    kernel.cache_results = False  # where TRITON_CACHE_AUTOTUNING asks for it, a device's driver is
    assert names(traced(Block(lambda x: kernel[(1,)](x)))).count("launched::_tuned") == 1
    assert len(runs) == 3


# -- in a trace ---------------------------------------------------------------------


def test_passes_need_not_agree_in_them() -> None:
    """A larger step may take another kernel; sizes of operations are solved all the same."""

    def one(tokens: int, requests: int, *kernels: str) -> Pass:
        spec = TensorSpec((Dim(tokens, Label.of("num_toks", tokens)),), "float32", (1,))
        launches = [Operation(i, "m", LAUNCHED + k, (), (), call=0) for i, k in enumerate(kernels)]
        add = Operation(len(kernels), "m", "aten::add.Tensor", (spec,), (spec,), call=0)
        return Pass(tokens, requests, (*launches, add))

    others = [one(83, 7), one(97, 11, "large")]
    _, formulas, operations = check(one(83, 11, "small"), others, one(101, 13, "large", "more"))
    assert names(list(operations)) == ["launched::small", "aten::add.Tensor"]
    assert formulas == {1: (Affine(0, 1, 0), Affine(0, 1, 0))}


# -- what is measured ---------------------------------------------------------------


@pytest.fixture
def launching(
    engine: VllmEngine, jitted: Jitted, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Trace]:
    """Trace the engine while the module at a path launches a kernel of its own."""

    own = torch.ones(2)

    def trace(path: str) -> Trace:
        module = engine.module(path)
        forward = module.forward

        def launches(*args: Any, **kwargs: Any) -> Any:
            jitted[(1,)](own)
            return forward(*args, **kwargs)

        monkeypatch.setattr(module, "forward", launches)
        return trace_model(engine)

    return trace


def test_a_sampler_that_launches_is_one_entry_and_all_else_is_as_before(
    engine: VllmEngine, trace: Trace, launching: Callable[[str], Trace]
) -> None:
    before = resolve(trace, engine, prefer_operations=True)
    own = [entry for entry in before.entries if entry.path == "sampler"]
    assert own
    assert all(entry.granularity == "operation" for entry in own)
    again = launching("sampler")
    found = resolve(again, engine, prefer_operations=True)
    (sampler,) = [entry for entry in found.entries if entry.path == "sampler"]
    assert (sampler.granularity, sampler.stateful) == ("module", False)
    assert sampler.reason == f"launched::_double: {LAUNCHES}"
    assert coverage.launched(found.entries) == {"sampler": ["_double"]}
    assert coverage.launched(before.entries) == {}

    signed = {e.key: s for e, s in signatures(again, found, engine).items()}
    for entry, signature in signatures(trace, before, engine).items():
        if entry.path != "sampler":
            assert signed[entry.key].canonical == signature.canonical
    whole = signed[sampler.key]
    assert '["launched::_double",[],[],[]]' in whole.canonical
    assert whole.kind == "batch"  # what the kernel's time depends on no size tells

    batch = Batch.parse("1x20+30,4x1+60")
    cover = step_cover(recorded(engine, batch), found.entries)
    assert cover.is_exact
    assert not cover.idle
    missing = step_cover(recorded(engine, batch), before.entries)
    assert missing.gaps == ("launched::_double in sampler",)
    with captured(engine, batch, [sampler.key]) as calls:
        engine.call(calls[0])


def test_what_lies_under_no_entry_is_an_error(
    engine: VllmEngine, launching: Callable[[str], Trace]
) -> None:
    again = launching("model.layers.1.mlp.act_fn")
    found = resolve(again, engine, prefer_operations=True)
    (whole,) = [e for e in found.entries if e.path == "model.layers.1.mlp.act_fn"]
    assert whole.granularity == "module"
    rest = RunnableSet(tuple(entry for entry in found.entries if entry is not whole))
    with pytest.raises(TraceError, match=r"lies under 0 entries"):
        check_cover([node for root in forest(again) for node in root.walk()], rest)


def test_attention_is_called_what_it_was(
    engine: VllmEngine, trace: Trace, launching: Callable[[str], Trace]
) -> None:
    """Its backend says what it launches: the signature has no kernels beside it."""
    path = "model.layers.1.self_attn.attn"

    def canonical(of: Trace) -> str:
        found = signatures(of, resolve(of, engine, prefer_operations=True), engine)
        return next(s.canonical for e, s in found.items() if e.path == path)

    again = launching(path)
    assert any(op.is_launch and op.path == path for op in again.operations)
    assert canonical(again) == canonical(trace)


def test_a_trace_with_launches_is_read_again(
    launching: Callable[[str], Trace], tmp_path: Any
) -> None:
    again = launching("sampler")
    again.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == again


def test_the_wrapped_sampler_is_known_by_what_it_wraps() -> None:
    """No kernel's name tells whether it draws in float64."""

    class Plain:
        def __init__(self, fp64: bool) -> None:
            self.use_fp64_gumbel = fp64

        def __call__(self, logits: Any) -> Any:
            return logits + 1

    sampler = Sampler(Plain(True))
    assert sampler(1) == 2
    assert sampler.use_fp64_gumbel
    assert attributes(sampler, "sampler")["impl"] == {"class": "Plain", "use_fp64_gumbel": True}
    assert attributes(sampler, "sampler") != attributes(Sampler(Plain(False)), "sampler")
