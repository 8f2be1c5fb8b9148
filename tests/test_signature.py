"""Signatures: what the model decides of a call, nothing of the request, the machine or the run."""

from __future__ import annotations

import getpass
import hashlib
import json
import re
import socket
from collections import Counter
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from conftest import Elsewhere
from engine_helpers import ATTENTION, LAYERS

from dooly_backend.database.records import Signature
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.operations.callgraph import signatures
from dooly_backend.operations.runnable import Entry, RunnableSet, resolve
from dooly_backend.operations.signature import attributes, kind_of, signature_of
from dooly_backend.operations.tree import any_layer
from dooly_backend.tracing import sizes as sizes_module
from dooly_backend.tracing.labels import ENGINE, MODEL_CONFIG, NONE, NUM_REQS, NUM_TOKS, Dim, Label
from dooly_backend.tracing.trace import Affine, CheckResult, Operation, TensorSpec, Trace
from dooly_backend.tracing.tracer import trace_model

Signed = dict[Entry, Signature]


def by_path(signed: Signed) -> dict[str, str]:
    return {f"{entry.path}#{entry.ordinal}": s.hash for entry, s in signed.items()}


# -- of a real model ------------------------------------------------------------


def test_anyone_can_recompute_them(signed: Signed) -> None:
    for signature in signed.values():
        assert signature.hash == hashlib.sha256(signature.canonical.encode()).hexdigest()
        value = json.loads(signature.canonical)
        again = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert again == signature.canonical
        assert (value["name"], value["granularity"]) == (signature.name, signature.granularity)


def test_layers_of_one_kind_share_theirs(signed: Signed) -> None:
    found: dict[str, list[str]] = {}
    for entry, signature in signed.items():
        found.setdefault(any_layer(entry.path), []).append(signature.hash)
    for path, hashes in found.items():
        assert len(hashes) == (LAYERS if "*" in path else 1)
        if path == "model.layers.*.input_layernorm":
            first, *others = hashes  # the first layer has no residual to add
            assert first not in others
            assert len(set(others)) == 1
        else:
            assert len(set(hashes)) == 1, path
    norms = {s.hash for s in signed.values() if s.name == "RMSNorm"}
    assert len(norms) == 2  # with and without a residual, wherever they are
    counted = Counter(signature.hash for signature in signed.values())
    assert len(counted) == 12


def test_what_differs_has_another(signed: Signed) -> None:
    """Projections of one class and other sizes are other signatures."""
    paths = {entry.path: signature.hash for entry, signature in signed.items()}
    layer = "model.layers.1."
    rows = [paths[layer + name] for name in ("self_attn.o_proj", "mlp.down_proj")]
    assert len(set(rows)) == 2


def test_kinds(signed: Signed) -> None:
    kinds = {entry.path: signature.kind for entry, signature in signed.items()}
    assert {path for path, kind in kinds.items() if kind == "batch"} == set(ATTENTION)
    assert {path for path, kind in kinds.items() if kind == "requests"} == {
        "logits_processor",
        "sampler",
    }
    assert set(kinds.values()) == {"batch", "requests", "tokens"}


@pytest.mark.parametrize("sizes", [(331, 7), (1013, 23)])
@pytest.mark.parametrize("finer", [False, True], ids=["modules", "operations"])
def test_they_do_not_depend_on_the_traced_step(
    engine: VllmEngine,
    trace: Trace,
    sizes: tuple[int, int],
    finer: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = by_path(signatures(trace, resolve(trace, engine, finer), engine))
    monkeypatch.setattr(sizes_module, "CONTEXT", 37)
    again = trace_model(engine, sizes=sizes)
    assert (again.num_tokens, again.num_reqs) == sizes
    assert by_path(signatures(again, resolve(again, engine, finer), engine)) == expected


def test_they_are_the_same_in_another_process(signed: Signed, elsewhere: Elsewhere) -> None:
    """With other limits of the engine, other threads and another number of layers built."""
    mine = {entry.path: s.canonical for entry, s in signed.items()}
    for path, (_, canonical) in elsewhere.smollm.items():
        assert canonical == mine[path], path
    assert len(elsewhere.smollm) == 9 * 2 + 4
    assert {digest for digest, _ in elsewhere.smollm.values()} == {s.hash for s in signed.values()}


def test_attributes_that_matter(elsewhere: Elsewhere) -> None:
    """Another epsilon is another norm; another window another attention, where there is one."""
    sliding, full = "model.layers.2.self_attn.attn", "model.layers.1.self_attn.attn"
    for path, (digest, _) in elsewhere.tiny.items():
        differs = path.endswith("norm") or path in (sliding, ATTENTION[0])
        assert (elsewhere.changed[path][0] != digest) is differs, path
    assert elsewhere.tiny[sliding] == elsewhere.tiny[ATTENTION[0]]
    assert elsewhere.tiny[sliding][0] != elsewhere.tiny[full][0]


def test_they_do_not_depend_on_the_order_of_layers(elsewhere: Elsewhere) -> None:
    """Sliding, full, sliding against full, sliding, full."""
    hashes = {digest for digest, _ in elsewhere.tiny.values()}
    assert {digest for digest, _ in elsewhere.swapped.values()} == hashes
    first, second = ATTENTION[:2]
    assert elsewhere.swapped[first] == elsewhere.tiny[second]
    assert elsewhere.swapped[second] == elsewhere.tiny[first]


def test_nothing_of_the_request_or_the_machine(signed: Signed, trace: Trace) -> None:
    tokens, requests, context = trace.num_tokens, trace.num_reqs, sizes_module.CONTEXT
    forbidden = {tokens, requests, requests + 1, context, context + 1, tokens - requests + 1}

    def numbers(value: Any) -> set[int]:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            return {number for item in value for number in numbers(item)}
        if isinstance(value, str):
            is_size = re.fullmatch(r"[TRE\d*+^-]+", value)
            return {int(part) for part in re.findall(r"\d+", value)} if is_size else set()
        return {value} if isinstance(value, int) and not isinstance(value, bool) else set()

    for signature in signed.values():
        value = json.loads(signature.canonical)
        assert not forbidden & numbers(value["operations"]), signature.name
        assert not forbidden & numbers(value["attributes"]), signature.name
        text = signature.canonical
        for machine in ("/tmp", "/home", "/work", "0x", socket.gethostname()):
            assert machine not in text, signature.name
        assert getpass.getuser() not in re.findall(r"\w+", text)
        assert not re.search(r"layers\.\d", text), signature.name


def test_what_it_says_of_a_projection(signed: Signed) -> None:
    (found,) = {s.canonical for s in signed.values() if s.name == "QKVParallelLinear"}
    value = json.loads(found)
    assert value["attributes"]["output_size_per_partition"] == 960
    assert value["stateful"] == {}
    assert set(value["kernels"]) == {"capability", "architecture", "libraries"}
    assert value["kernels"]["libraries"]
    name, inputs, _, _ = value["operations"][-1]
    assert name == "_C::onednn_mm.default"
    assert inputs[:2] == [
        ["bfloat16", "contiguous", ["T", 960]],
        ["bfloat16", "contiguous", ["T", 576]],
    ]


def test_what_it_says_of_attention(signed: Signed) -> None:
    (found,) = {s.canonical for s in signed.values() if s.name == "Attention"}
    value = json.loads(found)
    assert value["stateful"] == {
        "backend": "CPU_ATTN",
        "kv_cache_dtype": "auto",
        "block_size": 128,
        "execution_mode": "eager",
    }
    assert value["attributes"]["num_kv_heads"] == 3
    assert value["attributes"]["impl"]["scale"] == 0.125


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
    ],
)
def test_how_a_size_is_written(dim: Dim, formula: Affine, text: str) -> None:
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
