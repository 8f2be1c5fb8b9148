"""A trace as a tree: layers that are alike collapse, constants say where they stand."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console

from dooly_backend.operations.render import render
from dooly_backend.tracing.labels import ENGINE, MODEL_CONFIG, NUM_TOKS, Dim, Label
from dooly_backend.tracing.trace import (
    Affine,
    CheckResult,
    ModuleRecord,
    Operation,
    TensorSpec,
    Trace,
)

ROOT = Path(__file__).resolve().parent.parent
T = Dim(59, Label.of(NUM_TOKS, 59))
HIDDEN = Dim(4096, Label.of(MODEL_CONFIG, 4096))
BLOCK = Dim(128, Label.of(ENGINE, 128))
UNKNOWN = Dim(7)


def operation(index: int, call: int | None, path: str, *dims: Dim) -> Operation:
    tensor = TensorSpec(dims, "bfloat16", tuple(1 for _ in dims))
    return Operation(index, path, "aten::linear.default", (tensor,), (tensor,), (), None, call)


def trace_of(widths: list[Dim]) -> Trace:
    """A model of one linear layer after another, of these widths."""
    modules = [ModuleRecord("", "Model", None)]
    operations = [operation(0, None, "(step)", T)]
    for layer, width in enumerate(widths):
        path = f"model.layers.{layer}"
        modules += [
            ModuleRecord(path, "Layer", 0),
            ModuleRecord(f"{path}.proj", "Linear", len(modules)),
        ]
        operations.append(
            operation(len(operations), len(modules) - 1, f"{path}.proj", T, width)
        )  # fmt: skip
    return Trace(
        model="a model",
        num_tokens=59,
        num_reqs=9,
        layers=len(widths),
        modules=tuple(modules),
        operations=tuple(operations),
        check=CheckResult(10, 10, 9, 1, 10, 3, 3),
        formulas={1: (Affine(0, 1, 0), Affine(4096, 0, 0, 2), None)},
        origins={
            "model_config": {4096: ("model.layers.0.proj.weight[0]", "config.hidden_size")},
            "engine": {128: ("block_size",)},
        },
    )


def text(trace: Trace) -> str:
    out = StringIO()
    Console(file=out, width=140).print(render(trace))
    return out.getvalue()


def test_layers_that_are_alike_collapse() -> None:
    shown = text(trace_of([HIDDEN, BLOCK, BLOCK, BLOCK, HIDDEN]))
    assert "model.layers.1 ... model.layers.3 (3 alike) Layer" in shown
    assert shown.count("aten::linear") == 3
    assert "model.layers.0 Layer" in shown
    assert "model.layers.4 Layer" in shown


def test_dimensions_show_their_origin() -> None:
    shown = text(trace_of([HIDDEN, BLOCK, UNKNOWN]))
    assert "[59:T, 4096]" in shown
    assert "[59:T, 128:E]" in shown
    assert "[59:T, 7:?]" in shown
    assert "4096 config.hidden_size" in shown  # the configuration rather than the weight
    assert "128 block_size" in shown
    assert "label accuracy 90.00% before repair, 10 of 10 sizes predicted" in shown
    assert "outside modules: 1 operations" in shown


def test_a_trace_file_reads_back(tmp_path: Path) -> None:
    trace = trace_of([HIDDEN, BLOCK])
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace


def test_reading_a_trace_needs_neither_torch_nor_an_engine(tmp_path: Path) -> None:
    trace_of([HIDDEN]).save(tmp_path / "trace.json")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n"
        "from pathlib import Path\n"
        "from dooly_backend.operations.render import render\n"
        "from dooly_backend.tracing.trace import Trace\n"
        "render(Trace.load(Path('trace.json')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
