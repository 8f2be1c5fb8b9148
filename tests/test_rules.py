"""Every dimension rule against the real operation on real tensors: sizes and labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dooly_backend.engines.paths import ModuleStack
from dooly_backend.errors import TraceError
from dooly_backend.tracing import modes
from dooly_backend.tracing.call import Call, Rule, rule
from dooly_backend.tracing.integers import LabelledInt
from dooly_backend.tracing.labels import (
    ENGINE,
    LITERAL,
    MODEL_CONFIG,
    NUM_REQS,
    NUM_TOKS,
    Dim,
    Label,
    Shape,
)
from dooly_backend.tracing.modes import DispatchTracer, FunctionTracer, Labeller, RuleSet
from dooly_backend.tracing.rules import MAPPING
from dooly_backend.tracing.trace import Operation

T, R = 59, 9
SIZES = {
    "T": Label.of(NUM_TOKS, T),
    "R": Label.of(NUM_REQS, R),
    "H": Label.of(MODEL_CONFIG, 24),  # hidden: 6 heads of 4
    "N": Label.of(MODEL_CONFIG, 6),
    "D": Label.of(MODEL_CONFIG, 4),
    "B": Label.of(ENGINE, 32),
}
VALUES = {"T": T, "R": R, "H": 24, "N": 6, "D": 4, "B": 32}
REQUESTS = {
    T: SIZES["T"], R: SIZES["R"], R + 1: Label.of(NUM_REQS, R + 1), R - 1: Label.of(NUM_REQS, R - 1)
}  # fmt: skip
LETTERS = {"num_toks": "T", "num_reqs": "R", "model_config": "M", "engine": "E", "literal": "L",
           "mix": "*", "none": "-"}  # fmt: skip

Function = Callable[..., Any]


class Run:
    """A function traced on labelled tensors; every rule it uses must give the real sizes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rules: RuleSet = modes.ALL_RULES) -> None:
        self.used: set[str] = set()
        self.operations: list[Operation] = []
        self._rules = rules
        monkeypatch.setattr(
            modes, "MAPPING", {name: self._checked(name, f) for name, f in MAPPING.items()}
        )

    def _checked(self, name: str, function: Rule) -> Rule:
        def wrapped(call: Call) -> list[Shape]:
            try:
                shapes = [tuple(shape) for shape in function(call)]
            except Exception as error:  # the tracer would fall back to shape matching
                raise AssertionError(f"{name} fails: {error!r}") from error
            sizes = [tuple(d.size for d in shape) for shape in shapes]
            assert sizes == list(call.outputs), f"{name} gives {sizes}, really {call.outputs}"
            self.used.add(name)
            return shapes

        return wrapped

    def __call__(self, function: Function, *shapes: str, dtype: Any = torch.float32) -> list[str]:
        """Run `function` on tensors of these dimensions ("TH", "1D"); labels of what it returns."""
        labeller = Labeller(
            {VALUES[k]: v for k, v in SIZES.items() if k not in "TR"}, REQUESTS, rules=self._rules
        )
        tensors = []
        for letters in shapes:
            sizes = [VALUES.get(letter, 1) for letter in letters]
            tensor = torch.zeros(sizes, dtype=dtype)
            labelled = [Dim(VALUES.get(k, 1), SIZES.get(k, Label())) for k in letters]
            labeller.stamp(tensor, tuple(labelled))
            tensors.append(tensor)
        functions = FunctionTracer(labeller)
        tracer = DispatchTracer(ModuleStack({}), labeller, {}, functions)
        with torch.inference_mode(), tracer.active():
            result = function(*tensors)
        self.operations = tracer.operations
        returned = result if isinstance(result, (tuple, list)) else [result]
        return [
            "".join(LETTERS[d.label.name] for d in labeller.shape(t)) for t in returned
        ]  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def heads(x: Any) -> Any:
    return x.view(-1, LabelledInt(6, SIZES["N"]), LabelledInt(4, SIZES["D"]))


def number(letter: str) -> LabelledInt:
    return LabelledInt(VALUES[letter], SIZES[letter])


#: name, function, shapes of its tensors, labels of what it returns, the rules it must use.
CASES: list[tuple[Function, str, str, str]] = [
    # creation
    (lambda x: x.new_empty(x.shape[0], number("D")), "TH", "TM", "aten::new_empty"),
    (lambda x: x.new_zeros(x.shape), "TH", "TM", "aten::new_zeros"),
    (lambda x: torch.zeros(x.size(0), 7), "TH", "TL", "aten::zeros"),
    (lambda x: torch.empty(x.shape[0] * x.shape[1]), "TH", "*", "aten::empty"),
    (lambda x: torch.ones((x.shape[0], number("B"))), "TH", "TE", "aten::ones"),
    (lambda x: torch.full((number("N"), 3), 1.0), "TH", "ML", "aten::full"),
    (lambda x: torch.arange(x.shape[0]), "TH", "T", "aten::arange"),
    (lambda x: torch.arange(0, x.shape[1], 2), "TH", "M", "aten::arange"),
    (lambda x: torch.eye(5), "TH", "LL", "aten::eye"),
    (lambda x: torch.empty_strided((x.shape[0], 3), (3, 1)), "TH", "TL", "aten::empty_strided"),
    # views
    (heads, "TH", "TMM", "aten::view"),
    (lambda x: heads(x).reshape(-1), "TH", "*", "aten::reshape"),
    (lambda x: heads(x).flatten(-2), "TH", "TM", "aten::flatten"),
    (lambda x: x.unflatten(-1, (2, -1)), "TH", "TLM", "aten::unflatten"),
    (lambda x: x.reshape(-1).view(x.shape), "TH", "TM", "aten::view"),
    (lambda x: x.view(torch.int8), "TH", "TM", "aten::view"),
    (lambda x, y: x.view_as(y), "TH TH", "TM", "aten::view_as"),
    (lambda x: x.unsqueeze(-1), "TH", "TM-", "aten::unsqueeze"),
    (lambda x: x.squeeze(0), "1TH", "TM", "aten::squeeze"),
    (lambda x: x.squeeze(), "1T1", "T", "aten::squeeze"),
    (lambda x: x.permute(2, 0, 1), "TNB", "ETM", "aten::permute"),
    (lambda x: x.movedim(0, -1), "TNB", "MET", "aten::movedim"),
    (lambda x: x.transpose(0, 1), "TH", "MT", "aten::transpose"),
    (lambda x: x.t(), "TH", "MT", "aten::t"),
    (lambda x: x.mT, "TNB", "TEM", "aten::mT aten::transpose"),
    (lambda x: x.expand(number("N"), -1), "1T", "MT", "aten::expand"),
    (lambda x, y: x.expand_as(y), "1H TH", "TM", "aten::expand_as"),
    (lambda x, y: x.broadcast_to(y.shape), "1H TH", "TM", "aten::broadcast_to"),
    (lambda x: x.as_strided((x.shape[0], 3), (24, 1)), "TH", "TL", "aten::as_strided"),
    # copies that grow
    (lambda x: x.repeat(1, 3), "TH", "TM", "aten::repeat"),
    (lambda x: x.repeat(number("N"), 1), "TH", "*M", "aten::repeat"),
    (lambda x: x.repeat_interleave(2, dim=-1), "TH", "TM", "aten::repeat_interleave"),
    (lambda x: x.repeat_interleave(number("N"), dim=0), "TH", "*M", "aten::repeat_interleave"),
    (lambda x: torch.nn.functional.pad(x, (0, 5)), "TH", "TM", "aten::pad"),
    (lambda x: torch.nn.functional.pad(x, (0, 0, 0, number("D"))), "TH", "*M", "aten::pad"),
    # parts
    (lambda x: x.split([number("D"), 20], dim=-1)[0], "TH", "TM", "aten::split_with_sizes"),
    (lambda x: x.split(number("D"), dim=-1)[0], "TH", "TM", "aten::split"),
    (lambda x: x.chunk(2, dim=-1)[1], "TH", "TM", "aten::chunk"),
    (lambda x: x.tensor_split(4, dim=1)[0], "TH", "TM", "aten::tensor_split"),
    (lambda x: x[..., : x.shape[-1] // 2], "TH", "TM", "aten::slice"),
    (lambda x: x[:, :7], "TH", "TL", "aten::slice"),
    (lambda x: x[:59], "BH", "MM", ""),
    (lambda x: x[:9], "BH", "RM", "aten::slice"),
    (lambda x: x[9:], "BH", "*M", "aten::slice"),
    (lambda x: x.new_empty(number("R") + 1)[number("R") - 1 :], "R", "L", "aten::slice"),
    (lambda x: x[:, :-3], "TH", "TM", "aten::slice"),
    (lambda x: x.narrow(1, 0, number("D")), "TH", "TM", "aten::narrow"),
    (lambda x: x.select(0, 3), "TH", "M", "aten::select"),
    (lambda x: x.unbind(1)[0], "TH", "T", "aten::unbind"),
    (lambda x: x.diagonal(), "HH", "M", "aten::diagonal"),
    (lambda x, y: torch.cat([x, y], dim=-1), "TH TD", "TM", "aten::cat"),
    (lambda x, y: torch.cat([x, y]), "TH RH", "*M", "aten::cat"),
    (lambda x, y: torch.stack([x, y], dim=-1), "TH TH", "TML", "aten::stack"),
    (lambda x, y: torch.vstack([x, y]), "TH RH", "*M", "aten::vstack"),
    (lambda x, y: torch.meshgrid(x, y, indexing="ij")[0], "T H", "TM", "aten::meshgrid"),
    # indexing
    (lambda x, i: x.index_select(0, i.long()), "BH T", "TM", "aten::index_select"),
    (lambda x, i: x[i.long()], "TH R", "RM", "aten::index"),
    (lambda x, i, j: x[i.long(), j.long()], "BNH T T", "TM", "aten::index"),
    (lambda x, i: x[:, i.long()], "TBH R", "TRM", "aten::index"),
    (lambda x, i: x.gather(1, i.long()), "TH TD", "TM", "aten::gather"),
    (lambda x, i: torch.take_along_dim(x, i.long(), 1), "TH TD", "TM", "aten::take_along_dim"),
    (lambda w, i: torch.nn.functional.embedding(i.long(), w), "BH T", "TM", "aten::embedding"),
    (lambda x, v: torch.searchsorted(x, v), "B T", "T", "aten::searchsorted"),
    (lambda x: torch.nn.functional.one_hot(x.long(), number("N")), "T", "TM", "aten::one_hot"),
    (lambda x: torch.nonzero(x + 1), "TD", "*L", "aten::nonzero"),
    # contractions
    (torch.nn.functional.linear, "TH NH", "TM", "aten::linear"),
    (torch.mm, "TH HN", "TM", "aten::mm"),
    (torch.matmul, "NTH NHT", "MTT", "aten::matmul"),
    (torch.matmul, "TH H", "T", "aten::matmul"),
    (torch.matmul, "1NTD RNDB", "RMTE", "aten::matmul"),
    (torch.bmm, "NTD NDT", "MTT", "aten::bmm"),
    (torch.mv, "TH H", "T", "aten::mv"),
    (torch.addmm, "H TD DH", "TM", "aten::addmm"),
    (torch.baddbmm, "NTT NTD NDT", "MTT", "aten::baddbmm"),
    (torch.outer, "T H", "TM", "aten::outer"),
    (lambda x, y: torch.einsum("tnd,ndb->tnb", x, y), "TND NDB", "TME", "aten::einsum"),
    (torch.nn.functional.scaled_dot_product_attention, "RNTD RNBD RNBD", "RMTM",
     "aten::scaled_dot_product_attention"),
    # reductions
    (lambda x: x.sum(dim=-1), "TH", "T", "aten::sum"),
    (lambda x: x.mean(dim=-1, keepdim=True), "TH", "T-", "aten::mean"),
    (lambda x: x.max(dim=1)[0], "TH", "T", "aten::max"),
    (lambda x: x.argmax(dim=-1), "RH", "R", "aten::argmax"),
    (lambda x: x.amax(dim=(0, 1)), "TNB", "E", "aten::amax"),
    (lambda x: x.any(), "TH", "", "aten::any"),
    (lambda x: x.topk(number("D"), dim=-1)[1], "TH", "TM", "aten::topk"),
    (lambda x: x.topk(3)[0], "TH", "TL", "aten::topk"),
    (lambda x: torch.multinomial(x + 1, 1), "RH", "R-", "aten::multinomial"),
    (lambda x: torch.bincount(x.long(), minlength=number("N")), "T", "M", "aten::bincount"),
    # preserving: matched by shape
    (torch.add, "TH H", "TM", ""),
    (torch.add, "T1 1H", "TM", ""),
    (lambda x: x.to(torch.bfloat16), "TH", "TM", ""),
    (lambda x: torch.softmax(x, -1), "NTT", "MTT", ""),
    (lambda x: x.cumsum(0), "R", "R", ""),
    (lambda x, y: torch.where(x > 0, x, y), "TH 1H", "TM", ""),
    (lambda x: torch.nn.functional.layer_norm(x, (number("H"),)), "TH", "TM", ""),
    (lambda x: x.sort(dim=-1)[1], "TH", "TM", ""),
    (lambda x: x.add_(1), "TH", "TM", ""),
]  # fmt: skip


def _id(case: tuple[Function, str, str, str]) -> str:
    return f"{case[3].split(' ')[0].removeprefix('aten::') or 'preserve'}-{case[1]}-{case[2]}"


@pytest.mark.parametrize("case", CASES, ids=[f"{i}-{_id(c)}" for i, c in enumerate(CASES)])
def test_sizes_and_labels(run: Run, case: tuple[Function, str, str, str]) -> None:
    function, shapes, expected, wanted = case
    if "BH" in shapes and expected.startswith("MM"):
        expected = "EM"  # a slice longer than the whole leaves it
    assert run(function, *shapes.split())[0] == expected
    assert not wanted or run.used & set(wanted.split())
    for op in run.operations:
        for dim in op.dims():
            assert dim.label or dim.size < 2, f"{op.name} leaves {dim} without a label"


#: Rules of operations that torch does not dispatch whole here, or that only a GPU has.
ELSEWHERE = {
    "aten::_unsafe_view", "aten::_reshape_alias", "aten::numpy_T", "aten::adjoint",
    "aten::_scaled_mm", "aten::_scaled_dot_product_flash_attention_for_cpu",
}  # fmt: skip


def test_families_share_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every rule function at least one operation is in the cases above."""
    used: set[str] = set()
    for function, shapes, _, _ in CASES:
        with monkeypatch.context() as patch:
            one = Run(patch)
            one(function, *shapes.split())
            used |= one.used
    families = {MAPPING[name].__name__ for name in used}
    aten = {name for name in MAPPING if name.startswith("aten::")} - ELSEWHERE
    missing = {MAPPING[name].__name__ for name in aten} - families
    assert missing == set()


# -- integers ------------------------------------------------------------------------------


def test_scalars_of_the_code_are_literals(run: Run) -> None:
    run(lambda x: x.pow(2).chunk(2, dim=-1), "TH")
    scalars = [d.label.name for op in run.operations for d in op.scalars if d.size == 2]
    assert scalars == ["literal", "literal"]


def test_scalars_of_the_model_are_not(run: Run) -> None:
    """The same value, once from an attribute of a module: the object tells, not the value."""
    run(lambda x: (x.topk(LabelledInt(2, SIZES["N"]))[0], x.topk(2)[0]), "TH")
    first, second = (op for op in run.operations if op.name.startswith("aten::topk"))
    assert first.scalars[0].label.name == "model_config"
    assert second.scalars[0].label.name == "literal"
    assert [d.label.name for d in first.outputs[0].dims] == ["num_toks", "model_config"]
    assert [d.label.name for d in second.outputs[0].dims] == ["num_toks", "literal"]


@pytest.mark.parametrize(
    ("result", "size"),
    [
        (number("N") * number("D"), 24), (2 * number("N"), 12), (number("H") // 4, 6),
        (-(-number("H") // 5), 5), (number("H") % 7, 3), (100 - number("H"), 76),
        (sum([number("N"), number("D")]), 10), (abs(number("N")), 6),
    ],
)  # fmt: skip
def test_arithmetic_keeps_the_origin(result: int, size: int) -> None:
    assert result == size
    assert isinstance(result, LabelledInt)
    assert result.label.name == "model_config"


def test_arithmetic_of_two_origins() -> None:
    assert (number("T") * number("H")).label.name == "mix"  # type: ignore[attr-defined]
    assert isinstance(number("T") / 2, float)
    assert number("T") == T
    assert hash(number("T")) == hash(T)


# -- the engine's kernels --------------------------------------------------------------------


def test_a_plan_is_sized_by_requests_and_engine() -> None:
    from dooly_backend.tracing.call import TensorShape

    lengths = TensorShape((Dim(R, SIZES["R"]),))
    starts = TensorShape((Dim(R + 1, Label.of(NUM_REQS, R + 1)),))
    call = Call("_C::get_scheduler_metadata", (lengths, starts), {}, ((40 * R + 4288,),))
    ((dim,),) = MAPPING["_C::get_scheduler_metadata"](call)
    assert dim.size == 40 * R + 4288
    assert dim.label.bases == {NUM_REQS, ENGINE}


# -- registering, and switching off ------------------------------------------------------------


def test_a_rule_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"aten::linear has a rule already: linear"):
        rule("aten::linear")(lambda call: [])
    assert MAPPING["aten::linear"].__name__ == "linear"


def test_rules_of_a_kind_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(x: Any) -> Any:
        return heads(torch.relu(x))

    def unlabelled(rules: RuleSet) -> set[str]:
        with monkeypatch.context() as patch:
            one = Run(patch, rules)
            one(attention, "TH")
        return {
            op.name.split(".")[0]
            for op in one.operations
            if any(d.size > 1 and not d.label for d in op.dims())
        }

    assert unlabelled(RuleSet()) == set()
    assert unlabelled(RuleSet(mapping=False)) == {"aten::view"}
    assert unlabelled(RuleSet(preserving=False, forced=True)) == {"aten::relu", "aten::view"}
    with pytest.raises(TraceError, match=r"ambiguous: aten::view"):
        unlabelled(RuleSet(preserving=False))


def test_a_literal_is_a_constant_of_the_code() -> None:
    call = Call("aten::chunk", (), {}, (), hints=(Dim(2),))
    assert call.given(2) == Dim(2, Label.of(LITERAL, 2))
    assert call.given(-1) == Dim(-1)
