"""The runnable set: the finest calls that run again, each kernel under exactly one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from engine_helpers import ATTENTION, LAYERS, MATRIX_PRODUCT, nodes

from dooly_backend.engines.base import CapturedCall
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.errors import TraceError
from dooly_backend.operations import runnable as runnable_module
from dooly_backend.operations.cover import recorded, step_cover
from dooly_backend.operations.runnable import HOST_TIME, Entry, RunnableSet, check_cover, resolve
from dooly_backend.operations.tree import any_layer, forest, is_structural, layer_of
from dooly_backend.tracing.labels import Dim
from dooly_backend.tracing.trace import CheckResult, ModuleRecord, Operation, TensorSpec, Trace
from dooly_backend.workload import Batch


@pytest.fixture(scope="module")
def by_operation(engine: VllmEngine, trace: Trace) -> RunnableSet:
    return resolve(trace, engine, prefer_operations=True)


# -- a real model ---------------------------------------------------------------


@pytest.mark.parametrize("finer", [False, True], ids=["modules", "operations"])
@pytest.mark.parametrize("key", ["1x40+0", "9x1+70", "1x20+30,4x1+60,2x8+0"])
def test_every_kernel_of_any_step_lies_under_one_entry(
    engine: VllmEngine, runnable: RunnableSet, by_operation: RunnableSet, key: str, finer: bool
) -> None:
    """The set is found on a mixed step: prefills alone and decodes alone have no other kernels."""
    entries = (by_operation if finer else runnable).entries
    cover = step_cover(recorded(engine, Batch.parse(key)), entries)
    assert cover.is_exact
    assert (cover.gaps, cover.doubles, cover.idle) == ((), (), ())
    assert cover.kernels >= 80  # of three layers in float32: all that there are


def test_a_step_shows_what_is_missing_and_what_is_there_twice() -> None:
    """The traced step itself, under its own entries with one taken away or doubled."""
    whole = made_up(OPERATIONS)
    first = Entry("block.first", None, "Linear", "Linear", (OPERATIONS[0],), False)
    add = Entry("block", 2, "aten::add", "Block", (OPERATIONS[5],), False)
    rest = Entry("block.second", None, "Linear", "Linear", (OPERATIONS[7],), False)
    custom = Entry("block", 1, "vllm::custom", "Block", tuple(OPERATIONS[2:5]), False)
    cover = step_cover(whole, [first, custom, add, rest])
    assert cover.is_exact
    assert cover.kernels == 5
    cover = step_cover(whole, [first, first, custom, rest])
    assert cover.doubles == ("aten::mul in block.first",)
    assert cover.gaps == ("aten::add in block",)
    other = Entry("block", 2, "aten::sub", "Block", (OPERATIONS[5],), False)
    elsewhere = Entry("sampler", None, "Sampler", "Sampler", (OPERATIONS[5],), False)
    cover = step_cover(whole, [first, custom, other, rest, elsewhere])
    assert cover.gaps == ("aten::add in block",)  # another operation at its place
    assert cover.idle == ("block", "sampler")


@pytest.mark.parametrize("finer", [False, True], ids=["modules", "operations"])
def test_a_cover_has_no_gap_and_nothing_twice(
    trace: Trace, runnable: RunnableSet, by_operation: RunnableSet, finer: bool
) -> None:
    entries = (by_operation if finer else runnable).entries
    all_nodes = nodes(trace)
    check_cover(all_nodes, RunnableSet(entries))
    for index in range(len(entries)):
        without = RunnableSet(entries[:index] + entries[index + 1 :])
        with pytest.raises(TraceError, match=r"lies under 0 entries .* instead of one"):
            check_cover(all_nodes, without)
        twice = RunnableSet((*entries, entries[index]))
        with pytest.raises(TraceError, match="lies under 2 entries"):
            check_cover(all_nodes, twice)


def test_entries_are_in_the_order_of_the_pass(
    runnable: RunnableSet, by_operation: RunnableSet
) -> None:
    for found in (runnable, by_operation):
        positions = [entry.position for entry in found.entries]
        assert positions == sorted(positions)
        keys = [entry.key for entry in found.entries]
        assert len(keys) == len(set(keys))


def test_on_a_cpu_leaf_modules_stay_whole(runnable: RunnableSet) -> None:
    assert {entry.granularity for entry in runnable.entries} == {"module"}
    assert len(runnable.entries) == 9 * LAYERS + 4  # 9 a layer; embedding, norm, logits, sampler
    per_layer = [any_layer(e.path) for e in runnable.entries if layer_of(e.path) == 1]
    assert per_layer == [
        f"model.layers.*.{name}"
        for name in (
            "input_layernorm",
            "self_attn.qkv_proj",
            "self_attn.rotary_emb",
            "self_attn.attn",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_up_proj",
            "mlp.act_fn",
            "mlp.down_proj",
        )
    ]
    for entry in runnable.entries:
        assert entry.stateful == (entry.path in ATTENTION)
        assert (entry.reason == HOST_TIME) is not entry.stateful


@pytest.mark.parametrize("finer", [False, True], ids=["modules", "operations"])
def test_attention_needs_its_context_and_says_why(
    engine: VllmEngine, runnable: RunnableSet, by_operation: RunnableSet, finer: bool
) -> None:
    found = by_operation if finer else runnable
    stateful = [entry for entry in found.entries if entry.stateful]
    # Found by running the calls; the engine's own registry says the same.
    assert {entry.path for entry in stateful} == engine.stateful
    for entry in stateful:
        assert (entry.granularity, entry.name) == ("module", "Attention")
        assert "context" in entry.reason
        assert entry in found.fallbacks()


def test_operations_where_kernels_decide(by_operation: RunnableSet) -> None:
    by_path: dict[str, list[Entry]] = {}
    for entry in by_operation.entries:
        by_path.setdefault(entry.path, []).append(entry)
    for path in ("model.layers.1.self_attn.qkv_proj", "model.layers.0.mlp.down_proj"):
        assert [(e.granularity, e.name) for e in by_path[path]] == [("operation", MATRIX_PRODUCT)]
    norm = by_path["model.layers.1.input_layernorm"]
    assert "aten::rsqrt.default" in [entry.name for entry in norm]
    assert {entry.granularity for entry in norm} == {"operation"}
    for entry in by_operation.entries:
        if entry.granularity == "operation":
            assert not is_structural(entry.operations[0])
            assert not entry.reason
    assert by_operation.fallbacks() == [e for e in by_operation.entries if e.stateful]


# -- resolution on a made-up pass -----------------------------------------------

MATRIX = TensorSpec((Dim(8), Dim(4)), "float32", (4, 1))


def op(index: int, path: str, call: int, name: str = "aten::mul", **more: Any) -> Operation:
    return Operation(index, path, name, (MATRIX,), (MATRIX,), call=call, **more)


def made_up(operations: list[Operation]) -> Trace:
    """A model of one block with two leaves, and a kernel of the block's own."""
    modules = (
        ModuleRecord("", "Model"),
        ModuleRecord("block", "Block", 0),
        ModuleRecord("block.first", "Linear", 1),
        ModuleRecord("block.second", "Linear", 1),
    )
    return Trace("made-up", 100, 10, 1, modules, tuple(operations), CheckResult(0, 0, 0, 0))


OPERATIONS = [
    op(0, "block.first", 2),
    op(1, "block", 1, "aten::view.default"),
    op(2, "block", 1, "vllm::custom"),
    op(3, "block", 1, parent=2),
    op(4, "block", 1, parent=2),
    op(5, "block", 1, "aten::add"),
    op(6, "block.second", 3, "aten::view"),
    op(7, "block.second", 3),
]


class Refusing:
    """An engine whose calls fail by place, context and size; all else runs."""

    environment = SimpleNamespace(device_kind="cpu")
    moe: Mapping[str, Any] = {}

    def __init__(self, *refused: tuple[Any, ...]) -> None:
        self.refused = set(refused)
        self.tried: list[Batch] = []
        self._context: Any = None

    @contextmanager
    def running(self, context: Any) -> Iterator[None]:
        self._context = context
        yield

    def synchronize(self) -> None:
        pass

    @contextmanager
    def captured(
        self, engine: Any, batch: Batch, keys: Collection[Any]
    ) -> Iterator[list[CapturedCall]]:
        self.tried.append(batch)
        size = len(self.tried)

        def call(key: Any) -> Any:
            def target() -> None:
                how = "context" if self._context else "alone"
                for refused in ((key, how), (key, how, size)):
                    if refused in self.refused:
                        raise RuntimeError(f"{key[0]} fails\nwith more lines")

            return target

        yield [CapturedCall(k[0], call(k), (), {}, "context", i, k[1]) for i, k in enumerate(keys)]


def entries_of(
    engine: Refusing, monkeypatch: pytest.MonkeyPatch, prefer_operations: bool = False
) -> list[tuple[str, int | None, bool]]:
    monkeypatch.setattr(runnable_module, "captured", engine.captured)
    found = resolve(made_up(OPERATIONS), engine, prefer_operations)  # type: ignore[arg-type]
    return [(entry.path, entry.ordinal, entry.stateful) for entry in found.entries]


FIRST, SECOND, BLOCK = ("block.first", None), ("block.second", None), ("block", None)
CUSTOM, ADD = ("block", 1), ("block", 2)
FINEST = [(*FIRST, False), (*CUSTOM, False), (*ADD, False), (*SECOND, False)]


def test_the_finest_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels inside a custom operation are measured with it; views are not measured."""
    engine = Refusing()
    assert entries_of(engine, monkeypatch) == FINEST
    assert entries_of(engine, monkeypatch, prefer_operations=True) == [
        ("block.first", 0, False),
        ("block", 1, False),
        ("block", 2, False),
        ("block.second", 1, False),
    ]
    sizes = {(batch.num_tokens, batch.num_reqs) for batch in engine.tried}
    assert len(sizes) == 2
    assert all(tokens != 100 and requests != 10 for tokens, requests in sizes)


def test_a_module_that_needs_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Refusing((FIRST, "alone"), (("block.first", 0), "alone"))
    expected = [(*FIRST, True), *FINEST[1:]]
    assert entries_of(engine, monkeypatch) == expected
    operations = entries_of(engine, monkeypatch, prefer_operations=True)
    assert operations[0] == (*FIRST, True)


def test_an_operation_falls_back_to_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations get no context: where one needs it, all of its module is one entry."""
    engine = Refusing((ADD, "alone"))
    assert entries_of(engine, monkeypatch) == [(*BLOCK, False)]
    engine = Refusing((CUSTOM, "alone"), (BLOCK, "alone"))
    assert entries_of(engine, monkeypatch) == [(*BLOCK, True)]


def test_a_module_that_cannot_run_falls_back_to_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead = ((SECOND, "alone"), (SECOND, "context"))
    assert entries_of(Refusing(*dead), monkeypatch) == [(*BLOCK, False)]
    dead += ((BLOCK, "alone"), (BLOCK, "context"))
    assert entries_of(Refusing(*dead), monkeypatch) == [("", None, False)]


@pytest.mark.parametrize("size", [1, 2])
def test_running_at_one_size_is_not_enough(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    dead = ((SECOND, "alone", size), (SECOND, "context", size))
    assert entries_of(Refusing(*dead), monkeypatch) == [(*BLOCK, False)]


@pytest.mark.parametrize("size", [1, 2])
def test_context_that_one_size_needs(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    found = entries_of(Refusing((FIRST, "alone", size)), monkeypatch)
    assert found == [(*FIRST, True), *FINEST[1:]]


@pytest.mark.parametrize("other", [1, 2])
def test_alone_fails_at_one_size_and_everything_at_the_other(
    monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    dead = ((SECOND, "alone"), (SECOND, "context", other))
    assert entries_of(Refusing(*dead), monkeypatch) == [(*BLOCK, False)]


def test_nothing_inside_a_routed_module_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays whole, and what is inside may not bear to be called."""
    engine = Refusing()
    engine.moe = {"block": None}
    tried: list[Any] = []

    def captured(engine: Refusing, batch: Batch, keys: Collection[Any]) -> Any:
        tried.extend(keys)
        return Refusing.captured(engine, engine, batch, keys)

    monkeypatch.setattr(runnable_module, "captured", captured)
    found = resolve(made_up(OPERATIONS), engine, True)  # type: ignore[arg-type]
    (entry,) = found.entries
    assert (entry.path, entry.reason) == ("block", runnable_module.ROUTING)
    assert set(tried) == {("", None), BLOCK}


def test_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    places = (FIRST, SECOND, BLOCK, ("", None))
    dead = [(place, how) for place in places for how in ("alone", "context")]
    with pytest.raises(TraceError, match=r"^the model cannot be run again [^\n]* fails$"):
        entries_of(Refusing(*dead), monkeypatch)


def test_reasons_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Refusing((SECOND, "alone"), (SECOND, "context"))
    monkeypatch.setattr(runnable_module, "captured", engine.captured)
    found = resolve(made_up(OPERATIONS), engine, False)  # type: ignore[arg-type]
    (entry,) = found.entries
    assert entry.reason == "block.second: RuntimeError: block.second fails"
    assert [o.index for o in entry.operations] == list(range(8))


# -- the tree -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "layer", "shown"),
    [
        ("model.layers.12.mlp.experts.3", 12, "model.layers.*.mlp.experts.3"),
        ("model.layers.0", 0, "model.layers.*"),
        ("model.norm", None, "model.norm"),
        ("", None, ""),
        ("model.conv1d", None, "model.conv1d"),
    ],
)
def test_layers_in_paths(path: str, layer: int | None, shown: str) -> None:
    assert (layer_of(path), any_layer(path)) == (layer, shown)


def test_copies_that_a_cast_may_be() -> None:
    cast = op(0, "", 0, "aten::to.dtype")
    assert is_structural(cast)  # to the type it has
    wider = replace(MATRIX, dtype="float64")
    assert not is_structural(replace(cast, outputs=(wider,)))
    turned = replace(MATRIX, strides=(1, 8))
    assert not is_structural(replace(cast, name="aten::contiguous.default", inputs=(turned,)))
    assert is_structural(replace(cast, name="aten::view.default"))
    assert not is_structural(replace(cast, name="aten::viewing.default"))


def test_the_forest_of_a_pass() -> None:
    (root,) = forest(made_up(OPERATIONS))
    assert [node.path for node in root.walk()] == ["", "block", "block.first", "block.second"]
    block = root.children[0]
    assert [o.index for o in block.kernels] == [3, 4, 5]
    assert [o.index for o in root.all_operations()] == list(range(8))
