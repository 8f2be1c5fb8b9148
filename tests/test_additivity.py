"""Which calls are timed alone beside a live pass."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from dooly_backend.workload import Batch
from integration.additivity import rounds
from integration.additivity.rounds import leading, measure_rows, of_way
from integration.additivity.run import main, named


def entries(*paths_and_signatures):
    return {Place(path): SimpleNamespace(hash=name) for path, name in paths_and_signatures}


class Place:
    def __init__(self, path):
        self.path = path


def paths(signed):
    return [entry.path for entry in leading(signed)]


def test_a_deep_model_is_told_by_its_first_layers():
    signed = entries(
        ("model.embed", "e"), *((f"model.layers.{i}.mlp", "m") for i in range(32)), ("head", "h")
    )
    assert paths(signed) == [
        "model.embed", *(f"model.layers.{i}.mlp" for i in range(4)), "head"
    ]  # fmt: skip


def test_kinds_of_layers_that_come_late_are_all_twice():
    kinds = ["w", "w", "w", "f"] * 8
    signed = entries(*((f"model.layers.{i}.attn", kind) for i, kind in enumerate(kinds)))
    assert paths(signed) == [f"model.layers.{i}.attn" for i in range(8)]


def test_what_is_once_is_once_wherever_it_is():
    signed = entries(*((f"model.layers.{i}.mlp", "last" if i == 6 else "m") for i in range(7)))
    assert len(paths(signed)) == 7


def test_a_shallow_model_is_timed_whole():
    signed = entries(*((f"model.layers.{i}.mlp", "m") for i in range(3)))
    assert len(paths(signed)) == 3


def test_a_file_for_each_way():
    assert named(Path("out/additivity.csv"), "product") == Path("out/additivity.csv")
    assert named(Path("out/additivity-M.csv"), "layer") == Path("out/additivity-M-layer.csv")
    ways = main.make_context("run", ["--ahead", "layer", "--ahead", "product", "--ahead", "layer"])
    assert ways.params["ways"] == ("layer", "product")


@pytest.mark.engine
def test_both_ways_beside_the_same_live_steps(engine, trace, runnable, monkeypatch):
    monkeypatch.setattr(rounds, "SHORT_ROUNDS", 2)
    rows = measure_rows(engine, trace, runnable, [Batch.decode(2, 50)], ways=("product", "layer"))
    usual, layer = rows
    assert [row.ahead for row in rows] == ["product", "layer"]
    assert of_way(rows, "layer") == [layer]
    for row in rows:
        assert row.phase == "decode"
        assert 0 < row.forward_live_us < row.step_live_us
        assert 0 < row.forward_isolated_us < row.step_isolated_us
        assert len(row.rounds) == 1  # the calmer one of two
    assert usual.forward_isolated_us != layer.forward_isolated_us
