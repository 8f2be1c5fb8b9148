"""Experts and gates of two models beside each other: the tables, and gates that are timed."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dooly_backend.errors import InputError
from integration.cost.moe import apart, differing, expert_rows, gate_rows, write


def one_pass(model: str, number: int, us: dict[str, float], signature: str = "s") -> dict[str, Any]:
    points: dict[str, Any] = {key: {"median_us": value} for key, value in us.items()}
    points["routing=2048x64"] = {"reason": "too many tokens"}
    gates = [{"tokens": 16, "inputs_us": [10.0, 10.1, 10.05], "same_us": [10.0, 10.02]}]
    return {"model": model, "pass": number, "device": "D", "engine": "E", "signature": signature,
            "points": points, "gates": gates}  # fmt: skip


KEY = "routing=512x16"
PASSES = [
    one_pass("Lite", 0, {KEY: 100.0}),
    one_pass("Lite", 1, {KEY: 102.0}),
    one_pass("MoE", 0, {KEY: 100.5}),
    one_pass("MoE", 1, {KEY: 100.5}),
]


def test_what_models_and_passes_differ_by() -> None:
    first, last = expert_rows(PASSES)
    assert first == {
        "tokens": 512, "experts": 16, "Lite_us": 101.0, "MoE_us": 100.5,
        "models_differ_percent": 0.5, "passes_differ_percent": 2.0, "paper_differ_percent": 0.5,
    }  # fmt: skip
    assert (last["Lite_us"], last["models_differ_percent"], last["passes_differ_percent"]) == (
        ("",) * 3
    )
    assert last["paper_differ_percent"] == 0.2


def test_gates() -> None:
    row = gate_rows(PASSES)[0]
    assert (row["us"], row["inputs_differ_percent"]) == (10.05, 1.0)
    assert row["same_input_differs_percent"] == 0.2
    assert apart([3.0]) == ""


def test_the_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="use run first"):
        write(tmp_path)
    for made in PASSES:
        path = tmp_path / f"moe-{made['model']}-{made['pass']}.json"
        path.write_text(json.dumps(made))
    text = write(tmp_path)
    assert text == (tmp_path / "moe.md").read_text()
    assert "The models' layers have one signature." in text
    assert "Not measured: too many tokens." in text
    with (tmp_path / "gates.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    other = one_pass("MoE", 1, {KEY: 100.5}, "another") | {"model": "Third"}
    for path in tmp_path.glob("moe-MoE-*.json"):
        path.unlink()
    (tmp_path / "moe-Third-1.json").write_text(json.dumps(other))
    assert "Signatures differ." in write(tmp_path)
    lite = json.loads((tmp_path / "moe-Lite-1.json").read_text())
    for name, one, top_k in (("Third", other, 8), ("Lite", lite, 6)):
        kept = one | {"canonical": {"routing": {"top_k": top_k}}}
        (tmp_path / f"moe-{name}-1.json").write_text(json.dumps(kept))
    assert "`routing.top_k` is 6 in Lite, 8 in Third." in write(tmp_path)


def test_where_two_signatures_differ() -> None:
    one = {"dims": [1, 2], "kernels": ["a"], "same": {"x": 1}, "gone": 0}
    other = {"dims": [1, 3], "kernels": ["a", "b"], "same": {"x": 1}}
    assert differing(one, one) == {}
    assert differing(one, other) == {
        "dims.1": ("2", "3"), "kernels": ('["a"]', '["a", "b"]'), "gone": ("0", "nothing"),
    }  # fmt: skip


def test_a_gate_gets_random_inputs_and_the_same_one_again() -> None:
    torch = pytest.importorskip("torch")
    from dooly_backend.profiling.measure import Regime
    from integration.cost.moe_layers import IN_A_ROW, gates, measure_gates

    seen: list[Any] = []

    class Gate(torch.nn.Linear):
        input_size = 8

        def forward(self, x: Any) -> Any:
            seen.append(x)
            return super().forward(x)

    class Engine:
        def __init__(self) -> None:
            self.modules = {
                "model.layers.0.mlp.gate": torch.nn.Linear(8, 4),  # of a dense layer
                "model.layers.1.mlp.gate": Gate(8, 4, dtype=torch.bfloat16),
                "model.layers.2.mlp.gate": Gate(8, 4, dtype=torch.bfloat16),
                "model.layers.2.mlp.experts": object(),
            }
            self.moe = {f"model.layers.{i}.mlp.experts": i for i in (1, 2)}

        environment = SimpleNamespace(device_kind="cpu")
        configuration = SimpleNamespace(dtype="bfloat16", model="m")

        @contextmanager
        def running(self, context: Any) -> Iterator[None]:
            with torch.inference_mode():
                yield

        @contextmanager
        def routed(self, experts: Any) -> Iterator[None]:
            yield

        def call(self, call: Any) -> None:
            with self.running(None):
                call()

    engine: Any = Engine()
    assert list(gates(engine)) == ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"]
    regime = Regime(repeats=2, warmups=0, rounds=1, attempts=1)
    (row,) = measure_gates(engine, regime, (3,), inputs=4, same=2)
    assert (row["tokens"], len(row["inputs_us"]), len(row["same_us"])) == (3, 4, 2)
    assert all(us > 0 for us in (*row["inputs_us"], *row["same_us"]))
    assert {tuple(x.shape) for x in seen} == {(3, 8)}
    assert {x.dtype for x in seen} == {torch.bfloat16}
    # Each is run twice a turn, once in the other layer: four inputs, of which one three times.
    assert len(seen) == 2 * 2 * (4 + 2) * IN_A_ROW
    assert len({tuple(x.flatten().tolist()) for x in seen}) == 4
    engine.moe = {}
    with pytest.raises(InputError, match="no gate"):
        measure_gates(engine, regime, (3,), inputs=4, same=2)


def test_calls_in_a_row() -> None:
    pytest.importorskip("torch")
    from integration.cost.moe_layers import in_a_row

    seen: list[int] = []

    def layer(value: int) -> int:
        seen.append(value)
        return len(seen)

    assert in_a_row(layer, 3)(7) == 3
    assert seen == [7, 7, 7]


def test_a_gates_time_lies_between_two_that_events_see() -> None:
    """Whichever it saw once more often, and whatever an outlier took."""
    pytest.importorskip("torch")
    from integration.cost.moe_layers import middle

    low, high = [6.0] * 11 + [6.8] * 10, [6.0] * 10 + [6.8] * 11
    assert middle(high) / middle(low) - 1 < 0.015
    assert middle([*low, 60.0]) == pytest.approx(middle(low), abs=0.1)
