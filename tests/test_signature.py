"""Signatures: what the model decides of a call, nothing of the request, the machine or the run."""

from __future__ import annotations

import json
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dooly_backend.database.records import Signature
from dooly_backend.operations.runnable import Entry, RunnableSet
from dooly_backend.operations.signature import attributes, kind_of, signature_of
from dooly_backend.tracing.labels import ENGINE, MODEL_CONFIG, NONE, NUM_REQS, NUM_TOKS, Dim, Label
from dooly_backend.tracing.trace import Affine, CheckResult, Operation, TensorSpec, Trace

Signed = dict[Entry, Signature]


# -- of small calls -------------------------------------------------------------


class FakeEngine:
    """An engine with the modules that a test names."""

    def __init__(self, **modules: Any) -> None:
        self.modules = {path.replace("_", "."): module for path, module in modules.items()}
        self.stateful: frozenset[str] = frozenset()
        self.moe: dict[str, Any] = {}
        self.kernels = {"capability": "9.0"}

    def module(self, path: str) -> Any:
        return self.modules[path]

    def kernel_identity(self) -> dict[str, Any]:
        return self.kernels

    def stateful_identity(self, path: str) -> dict[str, Any]:
        return {"backend": "FAKE"}


def hash_of(
    dims: tuple[Dim, ...],
    formulas: tuple[Affine | None, ...],
    *,
    dtype: str = "bfloat16",
    strides: tuple[int, ...] | None = None,
    scalars: tuple[Dim, ...] = (),
    engine: FakeEngine | None = None,
) -> Signature:
    """The signature of a call of one operation with one input."""
    if strides is None:
        strides = tuple(reversed([1, *(d.size for d in reversed(dims))][: len(dims)]))
    tensor = TensorSpec(dims, dtype, strides)
    op = Operation(0, "leaf", "aten::mul.Tensor", (tensor,), (), scalars, call=0)
    trace = Trace("x", 107, 11, 1, (), (op,), CheckResult(0, 0, 0, 0), {0: formulas})
    entry = Entry("leaf", 0, op.name, "Leaf", (op,), False)
    return signature_of(entry, trace, engine or FakeEngine())  # type: ignore[arg-type]


MODEL = Label.of(MODEL_CONFIG, 576)
TOKENS, REQUESTS = Label.of(NUM_TOKS, 107), Label.of(NUM_REQS, 11)
T, R = Affine(0, 1, 0), Affine(0, 0, 1)


def constant(size: int) -> Affine:
    return Affine(size, 0, 0)


BASE = hash_of((Dim(107, TOKENS), Dim(576, MODEL)), (T, constant(576)))


def dims_of(signature: Signature) -> list[Any]:
    return json.loads(signature.canonical)["operations"][0][1][0][2]


def test_other_tokens_are_the_same_call() -> None:
    longer = (Dim(999, Label.of(NUM_TOKS, 999)), Dim(576, MODEL))
    assert hash_of(longer, (T, constant(576))) == BASE
    assert dims_of(BASE) == ["T", 576]


@pytest.mark.parametrize(
    "other",
    [
        hash_of((Dim(107, TOKENS), Dim(577, MODEL)), (T, constant(577))),
        hash_of((Dim(11, REQUESTS), Dim(576, MODEL)), (R, constant(576))),
        hash_of((Dim(963, TOKENS | MODEL), Dim(576, MODEL)), (Affine(0, 9, 0), constant(576))),
        hash_of((Dim(107, TOKENS), Dim(576, MODEL)), (T, constant(576)), dtype="float16"),
        hash_of((Dim(107, TOKENS), Dim(576, MODEL)), (T, constant(576)), strides=(960, 1)),
        hash_of(
            (Dim(107, TOKENS), Dim(576, MODEL)),
            (T, constant(576), constant(2)),
            scalars=(Dim(2, NONE),),
        ),
        hash_of((Dim(107, NONE), Dim(576, MODEL)), (constant(107), constant(576))),
    ],
    ids=["width", "requests", "heads", "dtype", "layout", "scalar", "constant"],
)
def test_what_makes_another_call(other: Signature) -> None:
    assert other.hash != BASE.hash


def test_kernels_make_another_call() -> None:
    engine = FakeEngine()
    engine.kernels = {"capability": "8.0"}
    dims, formulas = (Dim(107, TOKENS), Dim(576, MODEL)), (T, constant(576))
    assert hash_of(dims, formulas, engine=engine).hash != BASE.hash


@pytest.mark.parametrize(
    ("dim", "formula", "text"),
    [
        (Dim(964, TOKENS | MODEL), Affine(1, 9, 0), "9*T+1"),
        (Dim(12, REQUESTS), Affine(1, 0, 1), "R+1"),
        (Dim(118, TOKENS | REQUESTS), Affine(0, 1, 1), "T+R"),
        (Dim(683, TOKENS | MODEL), Affine(576, 1, 0), "T+576"),
        (Dim(2048, Label.of(ENGINE, 2048)), constant(2048), "E"),
        (Dim(112, TOKENS), Affine(0, 1, 0, 8), "T^8"),
        (Dim(144, REQUESTS | MODEL), Affine(0, 0, 9, 16), "9*R^16"),
        # Workspaces grow with the engine's threads: their size is nobody's.
        (Dim(4728, REQUESTS), Affine(4288, 0, 40), "40*R+E"),
        (Dim(4768, REQUESTS), Affine(4328, 0, 40), "40*R+E"),
        (Dim(75, REQUESTS | Label.of(ENGINE, 64)), Affine(64, 0, 1), "E"),
        # Blocks of tokens, looked up: another traced step has another number of them.
        (Dim(78, TOKENS | MODEL), None, "P"),
        (Dim(64, MODEL), None, 64),
    ],
)
def test_how_a_size_is_written(dim: Dim, formula: Affine | None, text: str | int) -> None:
    assert dims_of(hash_of((dim,), (formula,))) == [text]


@pytest.mark.parametrize(
    ("formulas", "stateful", "kind"),
    [
        ((T, constant(4)), False, "tokens"),
        ((R, constant(4)), False, "requests"),
        ((T, R), False, "batch"),
        ((Affine(1, 1, 1),), False, "batch"),
        ((constant(4), None), False, "constant"),
        ((T,), True, "batch"),
    ],
)
def test_what_a_call_depends_on(
    formulas: tuple[Affine | None, ...], stateful: bool, kind: str
) -> None:
    op = Operation(0, "leaf", "aten::mul.Tensor", (), ())
    trace = Trace("x", 107, 11, 1, (), (op,), CheckResult(0, 0, 0, 0), {0: formulas})
    entry = Entry("leaf", None, "Leaf", "Leaf", (op,), stateful)
    assert kind_of(entry, trace) == kind


# -- attributes -----------------------------------------------------------------

PATH = "model.layers.3.self_attn.attn"


def test_attributes_without_the_identity() -> None:
    module = SimpleNamespace(
        layer_name=PATH,
        prefix="model.layers.3",
        layer_idx=3,
        training=False,
        owner="model.layers.3.self_attn",  # a name for where it is, whatever it is called
        kv_sharing_target_layer_name="model.layers.1.self_attn.attn",
        _private=1,
        weight=object(),
        sliding_window=4096,
        attn_type="decoder",
        scale=0.125,
        use_sinks=True,
        soft_cap=None,
        impl=SimpleNamespace(layer_idx=3, window=4096, kind="attn"),
    )
    assert attributes(module, PATH) == {
        "sliding_window": 4096,
        "attn_type": "decoder",
        "scale": 0.125,
        "use_sinks": True,
        "soft_cap": None,
        "impl": {"class": "SimpleNamespace", "window": 4096, "kind": "attn"},
    }


def test_how_weights_are_quantised_is_an_attribute() -> None:
    """Triton's kernels of a mixture of experts show neither the method nor the formats."""

    class UnquantizedFusedMoEMethod(SimpleNamespace):
        pass

    class Fp8MoEMethod(SimpleNamespace):
        pass

    class Backend(Enum):
        TRITON = "TRITON"

    experts = torch.nn.Module()
    experts.w13_weight = torch.nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), False)
    experts.w13_scale = torch.nn.Parameter(torch.zeros(2), False)
    plain = attributes(experts, PATH)
    experts.quant_method = UnquantizedFusedMoEMethod()
    assert attributes(experts, PATH) == plain
    experts.quant_method = SimpleNamespace(old_quant_method=UnquantizedFusedMoEMethod())
    assert attributes(experts, PATH) == plain  # signatures of before are those of now
    experts.quant_method = Fp8MoEMethod(block_quant=False, fp8_backend=Backend.TRITON, layer=plain)
    assert attributes(experts, PATH)["quantization"] == {
        "class": "Fp8MoEMethod",
        "block_quant": False,
        "fp8_backend": "TRITON",
        "parameters": {"w13_scale": "float32", "w13_weight": "float8_e4m3fn"},
    }


def test_the_weights_of_what_has_an_implementation_do_not_count() -> None:
    """Attention of a model with fp8 weights and a bf16 cache is that of the bf16 model."""
    module = SimpleNamespace(impl=SimpleNamespace(), quant_method=SimpleNamespace())
    assert set(attributes(module, PATH)) == {"impl"}


def test_words_that_also_occur_in_a_path_are_kept() -> None:
    """An encoder's and a decoder's attention differ by such a word only."""
    path = "model.decoder.layers.0.attn"
    assert attributes(SimpleNamespace(attn_type="decoder"), path) == {"attn_type": "decoder"}


@pytest.mark.parametrize("where", ["leaf", "leaf.inner"])
def test_modules_inside_count_too(where: str) -> None:
    """A module that is measured with all below it differs when something below it does."""

    def signature(eps: float) -> Signature:
        engine = FakeEngine()
        engine.modules = {"leaf": SimpleNamespace(eps=1e-6), "leaf.inner": SimpleNamespace(a=1)}
        engine.modules[where].eps = eps
        ops = tuple(Operation(i, p, "aten::mul", (), ()) for i, p in enumerate(engine.modules))
        trace = Trace("x", 107, 11, 1, (), ops, CheckResult(0, 0, 0, 0))
        entry = Entry("leaf", None, "Leaf", "Leaf", ops, False)
        return signature_of(entry, trace, engine)  # type: ignore[arg-type]

    assert signature(1e-6) == signature(1e-6)
    assert signature(1e-6).hash != signature(1e-5).hash


def test_every_entry_is_signed(runnable: RunnableSet, signed: Signed) -> None:
    assert tuple(signed) == runnable.entries


# -- of stateful modules --------------------------------------------------------


def stateful_hash(strides: tuple[int, ...], name: str = "aten::mul", place: int = 3) -> Signature:
    """The signature of a stateful module with one operation on (T, 576) and two integers."""
    engine = FakeEngine(leaf=SimpleNamespace())
    engine.stateful = frozenset({"leaf"})
    spec = TensorSpec((Dim(107, TOKENS), Dim(576, MODEL)), "bfloat16", strides)
    op = Operation(0, "leaf", name, (spec,), (), (Dim(0), Dim(place)))
    formulas = {0: (T, constant(576), constant(0), constant(place))}
    trace = Trace("x", 107, 11, 1, (), (op,), CheckResult(0, 0, 0, 0), formulas)
    entry = Entry("leaf", None, "Leaf", "Leaf", (op,), stateful=True)
    return signature_of(entry, trace, engine)  # type: ignore[arg-type]


def test_stateful_modules_step_over_what_lies_between_rows() -> None:
    """Attention is handed a slice of the projection, or with QK-norm a tensor of its own."""
    dense = stateful_hash((576, 1))
    assert stateful_hash((960, 1)) == dense
    assert stateful_hash((1, 107)) != dense  # transposed: no row is dense
    assert stateful_hash((1152, 2)) != dense


def test_stateful_modules_may_take_any_place() -> None:
    """The block of a request's state has a number, which the engine hands out."""
    taken = stateful_hash((576, 1), "aten::select.int", 3)
    assert stateful_hash((576, 1), "aten::select.int", 4) == taken
    assert json.loads(taken.canonical)["operations"][0][3] == [0, "@"]
    assert stateful_hash((576, 1), "aten::sum.dim", 3) != stateful_hash(
        (576, 1), "aten::sum.dim", 4
    )
