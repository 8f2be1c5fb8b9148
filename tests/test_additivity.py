"""Which calls are timed alone beside a live pass."""

from types import SimpleNamespace

from integration.additivity.run import leading


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
