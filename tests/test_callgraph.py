"""The call graph of the full model, from a few layers of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from engine_helpers import LAYERS

from dooly_backend.database.records import Occurrence, Signature
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.errors import InputError, TraceError
from dooly_backend.operations.callgraph import occurrences
from dooly_backend.operations.runnable import Entry
from dooly_backend.tracing.trace import Operation

# -- of a real model ------------------------------------------------------------


@pytest.fixture(scope="module")
def graph(engine: VllmEngine, signed: dict[Entry, Signature]) -> list[Occurrence]:
    return occurrences(engine, signed)


def test_counts_are_the_full_models(graph: list[Occurrence]) -> None:
    """Three layers are built; thirty are counted."""
    counted: dict[str, int] = {}
    for occurrence in graph:
        counted[occurrence.path] = counted.get(occurrence.path, 0) + occurrence.count
    per_layer = {path for path in counted if ".layers." in path}
    assert len(per_layer) == 9
    assert {counted[path] for path in per_layer} == {30}
    assert {path: n for path, n in counted.items() if path not in per_layer} == {
        "model.embed_tokens": 1,
        "model.norm": 1,
        "logits_processor": 1,
        "sampler": 1,
    }
    assert sum(occurrence.count for occurrence in graph) == 9 * 30 + 4


def test_every_layer_is_counted_once(graph: list[Occurrence]) -> None:
    layers: dict[str, list[int]] = {}
    for occurrence in graph:
        if occurrence.layers:
            assert occurrence.count == len(occurrence.layers)
            layers.setdefault(occurrence.path, []).extend(occurrence.layers)
    assert all(sorted(found) == list(range(30)) for found in layers.values())
    norms = [o for o in graph if o.path == "model.layers.*.input_layernorm"]
    assert [o.layers for o in norms] == [(0,), tuple(range(1, 30))]
    assert norms[0].signature != norms[1].signature


def test_places_are_in_the_order_of_the_pass(graph: list[Occurrence]) -> None:
    assert [occurrence.position for occurrence in graph] == list(range(len(graph)))
    assert graph[0].path == "model.embed_tokens"
    assert [o.path for o in graph[-3:]] == ["model.norm", "logits_processor", "sampler"]
    assert len(graph) == 9 * 2 + 4  # the first layer, the layers behind it, and the rest


def test_a_layer_that_differs_from_its_kind(
    engine: VllmEngine, signed: dict[Entry, Signature]
) -> None:
    path = f"model.layers.{LAYERS - 1}.mlp.down_proj"
    other = Signature("RowParallelLinear", "module", "tokens", "{}")
    wrong = {entry: other if entry.path == path else s for entry, s in signed.items()}
    with pytest.raises(TraceError, match=r"^layers 1 and 2 are both of kind .*mlp\.down_proj"):
        occurrences(engine, wrong)


@pytest.mark.parametrize("name", ["mlp.down_proj", "mlp.act_fn"])
def test_a_layer_that_runs_less_than_its_kind(
    engine: VllmEngine, signed: dict[Entry, Signature], name: str
) -> None:
    for layer in (1, 2):
        path = f"model.layers.{layer}.{name}"
        fewer = {entry: s for entry, s in signed.items() if entry.path != path}
        with pytest.raises(TraceError, match="both of kind"):
            occurrences(engine, fewer)


# -- of made-up models ----------------------------------------------------------


def test_a_model_that_is_one_entry_cannot_be_counted_from_a_few_layers() -> None:
    """Where code between the layers launches kernels by itself, nothing finer covers them."""
    ops = tuple(Operation(i, f"model.layers.{i}.mlp", "aten::mul", (), ()) for i in range(2))
    whole = Entry("model", None, "Model", "Model", ops, True, "between layers")
    signed = {whole: Signature("Model", "module", "batch", "{}")}
    (found,) = occurrences(engine_of("aa", 2), signed)
    assert (found.path, found.count) == ("model", 1)
    with pytest.raises(TraceError, match=r"model runs only as a whole.*\(between layers\).*2 that"):
        occurrences(engine_of("aaaa", 2), signed)


def engine_of(kinds: str, layers: int) -> Any:
    return SimpleNamespace(layer_kinds=tuple(kinds), num_layers=layers, stage=range(len(kinds)))


def calls(*paths: str) -> dict[Entry, Signature]:
    """Entries at `paths`, signed by the last part of theirs."""
    found = {}
    for index, path in enumerate(paths):
        op = Operation(index, path, "aten::mul", (), ())
        name = path.rpartition(".")[2]
        found[Entry(path, None, name, name, (op,), False)] = Signature(
            name, "module", "tokens", name
        )
    return found


def counts(kinds: str, layers: int, *paths: str) -> list[tuple[str, str, int]]:
    found = occurrences(engine_of(kinds, layers), calls(*paths))
    return [(o.path, o.signature.name, o.count) for o in found]


def test_layers_of_several_kinds() -> None:
    paths = ["m.0.dense", "m.1.moe", "m.2.dense", "m.3.moe", "norm"]
    assert counts("dmdmdm", 4, *paths) == [
        ("m.*.dense", "dense", 1),
        ("m.*.moe", "moe", 3),
        ("m.*.dense", "dense", 2),
        ("norm", "norm", 1),
    ]


def test_a_call_that_a_layer_makes_twice() -> None:
    found = occurrences(engine_of("aaa", 2), calls("m.0.norm", "m.1.norm", "m.1.norm"))
    assert [(o.path, o.count) for o in found] == [("m.*.norm", 1), ("m.*.norm", 2), ("m.*.norm", 2)]
    assert all(len(o.layers) == o.count for o in found)


def test_layers_that_cannot_stand_for_the_model() -> None:
    """Too few were asked for: one line that says how many to ask for, not a traceback."""
    with pytest.raises(InputError, match=r"^--layers 1 does not [^\n]*--layers 2$"):
        counts("aaaa", 1, "m.0.norm")
    with pytest.raises(InputError, match=r"--layers 4"):
        counts("aaab", 2, "m.0.norm", "m.1.norm")


def test_a_model_of_one_layer() -> None:
    assert counts("a", 1, "m.0.norm", "norm") == [("m.*.norm", "norm", 1), ("norm", "norm", 1)]
