"""The trace of a real model: formulas that hold at other sizes, labels that do not change."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from engine_helpers import LAYERS, MATRIX_PRODUCT, inside_modules

from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.errors import InputError, TraceError
from dooly_backend.operations.cover import recorded
from dooly_backend.tracing import sizes as sizes_module
from dooly_backend.tracing import tracer
from dooly_backend.tracing.labels import MODEL_CONFIG, NUM_REQS, NUM_TOKS
from dooly_backend.tracing.sizes import traced_batch
from dooly_backend.tracing.trace import Operation, TensorSpec, Trace


def named(trace: Trace) -> list[tuple[str, str]]:
    return [(op.path, op.name) for op in inside_modules(trace)]


def label_names(trace: Trace) -> list[tuple[str, list[str]]]:
    return [(op.name, [dim.label.name for dim in op.dims()]) for op in inside_modules(trace)]


def operation(trace: Trace, path: str, name: str) -> Operation:
    (found,) = (op for op in trace.operations if (op.path, op.name) == (path, name))
    return found


# -- the differential check -----------------------------------------------------


def test_every_size_is_predicted(trace: Trace) -> None:
    dimensions = sum(len(list(op.dims())) for op in inside_modules(trace))
    assert dimensions > 900
    assert (trace.check.dimensions, trace.check.predicted) == (dimensions, dimensions)
    assert trace.check.agreeing + trace.check.repaired == dimensions
    assert trace.check.accuracy > 0.98
    assert all(f is not None for formulas in trace.formulas.values() for f in formulas)
    assert set(trace.formulas) == {op.index for op in inside_modules(trace)}


@pytest.mark.parametrize(("tokens", "requests"), [(40, 3), (701, 23), (1999, 64), (17, 1)])
def test_formulas_give_the_real_sizes_of_another_step(
    engine: VllmEngine, trace: Trace, tokens: int, requests: int
) -> None:
    fresh = recorded(engine, traced_batch(tokens, requests))
    assert named(fresh) == named(trace)
    for op, real in zip(inside_modules(trace), inside_modules(fresh), strict=True):
        predicted = [f(tokens, requests) for f in trace.formulas[op.index] if f]
        assert predicted == [dim.size for dim in real.dims()], (op.path, op.name)


def test_labels_say_what_the_formulas_say(trace: Trace) -> None:
    """After the repair, and with the one difference that sizes of the engine may grow, too."""
    for op in inside_modules(trace):
        for dim, formula in zip(op.dims(), trace.formulas[op.index], strict=True):
            assert formula is not None
            assert (NUM_TOKS in dim.label.bases) == bool(formula.tokens), (op.path, op.name, dim)
            assert (NUM_REQS in dim.label.bases) == bool(formula.requests), (op.path, op.name, dim)


def matrix_product(trace: Trace, path: str) -> tuple[TensorSpec, TensorSpec]:
    """Output and input of a linear layer's product; it writes its output to an argument."""
    output, source, *_ = operation(trace, path, MATRIX_PRODUCT).inputs
    return output, source


def test_labels_of_known_operations(trace: Trace) -> None:
    output, source = matrix_product(trace, "model.layers.1.self_attn.qkv_proj")
    assert [d.label.name for d in output.dims] == ["num_toks", "model_config"]
    assert [d.size for d in output.dims] == [trace.num_tokens, 960]
    assert [d.size for d in source.dims] == [trace.num_tokens, 576]
    embedding = operation(trace, "model.embed_tokens", "aten::embedding.default")
    assert [d.label.name for d in embedding.outputs[0].dims] == ["num_toks", "model_config"]
    logits, _ = matrix_product(trace, "logits_processor")
    assert [d.label.name for d in logits.dims] == ["num_reqs", "model_config"]
    counted = trace.labels()
    assert counted[MODEL_CONFIG] > 300
    assert len(trace.unlabelled()) < 0.01 * trace.check.dimensions


# -- other sizes ----------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(331, 7), (1013, 23)])
def test_labels_do_not_depend_on_the_traced_sizes(
    engine: VllmEngine, trace: Trace, sizes: tuple[int, int]
) -> None:
    again = tracer.trace_model(engine, sizes=sizes)
    assert (again.num_tokens, again.num_reqs, again.attempts) == (*sizes, 1)
    assert label_names(again) == label_names(trace)
    assert list(again.formulas.values()) == list(trace.formulas.values())


@pytest.mark.parametrize("sizes", [(576, 7), (331, 9), (331, 63)])
def test_sizes_of_the_model_are_traced_again(
    engine: VllmEngine,
    trace: Trace,
    sizes: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """576 is the hidden size, 9 the number of heads, 63 + 1 the head size."""
    again = tracer.trace_model(engine, sizes=sizes)
    assert again.attempts == 2
    assert "collide" in caplog.text
    assert (again.num_tokens, again.num_reqs) != sizes
    assert label_names(again) == label_names(trace)


def test_nothing_depends_on_the_context_of_the_decodes(
    engine: VllmEngine, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes_module, "CONTEXT", 37)
    again = tracer.trace_model(engine)
    assert label_names(again) == label_names(trace)
    assert list(again.formulas.values()) == list(trace.formulas.values())


def test_passes_that_run_other_operations_are_an_error(
    engine: VllmEngine, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that branches on the number of tokens: the trace would hold for some steps only."""
    module = engine.modules["model.layers.1.mlp.act_fn"]
    plain = type(module).forward

    def branching(x: Any) -> Any:
        result = plain(module, x)
        return result if x.shape[0] == trace.num_tokens else result + 0

    monkeypatch.setattr(module, "forward", branching)
    with pytest.raises(TraceError, match=r"diverge.*model\.layers\.1\.mlp"):
        tracer.trace_model(engine)


# -- the tree of calls ----------------------------------------------------------


def test_calls_form_a_tree(engine: VllmEngine, trace: Trace) -> None:
    for index, record in enumerate(trace.modules):
        assert type(engine.module(record.path)).__name__ == record.module_class
        if record.caller is None:
            assert record.path in ("", "logits_processor", "sampler")
            continue
        assert record.caller < index
        caller = trace.modules[record.caller].path
        assert record.path.startswith(f"{caller}." if caller else "model")
    for op in inside_modules(trace):
        assert op.call is not None
        assert trace.modules[op.call].path == op.path
    assert all(op.call is None for op in trace.operations if op not in inside_modules(trace))


def test_every_layer_runs_the_same_modules(trace: Trace) -> None:
    counted = Counter(record.path for record in trace.modules)
    assert set(counted.values()) == {1}
    per_layer = [
        [p.removeprefix(f"model.layers.{i}") for p in counted if p.startswith(f"model.layers.{i}.")]
        for i in range(LAYERS)
    ]
    assert ".self_attn.rotary_emb" in per_layer[0]
    assert per_layer[0] == per_layer[1] == per_layer[2]


def test_bodies_of_custom_operations(trace: Trace) -> None:
    """The kernels of attention lie inside the custom operations that vLLM registers."""
    by_index = {op.index: op for op in trace.operations}
    parents = {op.index: by_index[op.parent] for op in trace.operations if op.parent is not None}
    name = "_C::cpu_attention_with_kv_cache.default"
    kernel = operation(trace, "model.layers.1.self_attn.attn", name)
    assert parents[kernel.index].name == "vllm::unified_attention_with_output.default"
    for index, parent in parents.items():
        assert parent.index < index
        assert parent.name.startswith("vllm::")
        assert parent.path == by_index[index].path


# -- the file -------------------------------------------------------------------


def test_a_trace_file_gives_the_trace_back(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert loaded == trace
    assert loaded.labels() == trace.labels()


def test_files_that_are_no_trace(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.save(path)
    value = json.loads(path.read_text())
    del value["operations"][3]["outputs"]
    broken = {
        "missing.json": None,
        "text.json": "not JSON",
        "list.json": "[]",
        "other.json": '{"schema": 1}',
        "newer.json": json.dumps(value | {"schema": 99}),
        "part.json": json.dumps(value),
    }
    for name, text in broken.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=rf"^[^\n]*{name}[^\n]*$"):
            Trace.load(tmp_path / name)


def test_accuracy_is_a_fraction(trace: Trace) -> None:
    half = replace(trace.check, agreeing=trace.check.dimensions // 2)
    assert half.accuracy == pytest.approx(0.5, abs=0.01)
