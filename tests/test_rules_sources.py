"""Source labelling on a toy engine: integers in place, tensors by memory, sizes of passes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dooly_backend.errors import TraceError
from dooly_backend.tracing.integers import LabelledInt
from dooly_backend.tracing.labels import ENGINE, MODEL_CONFIG, Source
from dooly_backend.tracing.modes import Labeller
from dooly_backend.tracing.sources import Sources, collect, request_labels
from dooly_backend.tracing.tracer import plan_passes


class Implementation:
    """A plain object that a module holds, as attention modules hold theirs."""

    def __init__(self) -> None:
        self.num_kv_heads = 2
        self.block_size = 64
        self.is_causal = True


class Handle:
    n = 0

    def __init__(self) -> None:
        self.n = 192


class Layer(torch.nn.Module):
    """64 wide, as the engine's blocks are; the packed weight hides in a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(192, 64))
        self.register_buffer("table", torch.zeros(1000, 16))
        self.hidden = 64
        self.parts = [64, 64, 64]
        self.calls = 5
        self.impl = Implementation()
        handle = Handle()
        self.multiply = lambda x: x.new_empty(handle.n)
        self.handle_of_closure = lambda: handle
        columns, packed = 192, torch.zeros(24, 512)
        self.sizes_of_closure = lambda: (columns, packed)
        self.part = partial(torch.add, alpha=96)


def engine_of(layer: Layer) -> Any:
    layer.kv_cache = torch.zeros(300, 2, 64, 64)
    runner = SimpleNamespace(num_kv_heads=2, blocks=torch.zeros(48, 16), max_num_seqs=48)
    return SimpleNamespace(
        configuration=SimpleNamespace(
            hf_config={"hidden_size": 64, "eos_token_id": 7, "nested": {"sizes": [16, True]}}
        ),
        modules={"layer": layer},
        limits={"max_num_seqs": 48, "block_size": 64, "num_blocks": 300},
        caches=lambda: iter(
            [("layer.kv_cache", layer.kv_cache, ("engine", "literal", "engine", "model_config"))]
        ),
        machinery={"runner": runner},
    )


def names(labeller: Labeller, tensor: Any) -> list[str]:
    return [dim.label.name for dim in labeller.shape(tensor)]


def test_every_source_has_a_path() -> None:
    sources = collect(engine_of(Layer()))
    origins = sources.origins
    assert origins[Source(MODEL_CONFIG, 64)][0] == "config.hidden_size"
    assert "config.nested.sizes[0]" in origins[Source(MODEL_CONFIG, 16)]
    assert "layer.weight[0]" in origins[Source(MODEL_CONFIG, 192)]
    assert "layer.impl.num_kv_heads" in origins[Source(MODEL_CONFIG, 2)]
    assert origins[Source(ENGINE, 48)][0] == "max_num_seqs"
    assert set(origins[Source(ENGINE, 48)][1:]) == {"runner.max_num_seqs", "runner.blocks[0]"}
    assert Source(MODEL_CONFIG, 7) not in origins  # a token's id sizes nothing
    assert Source(MODEL_CONFIG, 5) not in sources.sizes  # nor does a counter, by its value


def test_integers_are_labelled_in_place_and_put_back() -> None:
    layer = Layer()
    sources = collect(engine_of(layer))
    with sources.tainted():
        assert isinstance(layer.hidden, LabelledInt)
        assert layer.hidden.label.name == "model_config"
        assert [part.label.name for part in layer.parts] == ["model_config"] * 3  # type: ignore[attr-defined]
        assert layer.impl.num_kv_heads.label.name == "model_config"  # type: ignore[attr-defined]
        assert layer.impl.block_size.label.name == "engine"  # type: ignore[attr-defined]
        assert layer.impl.is_causal is True
        assert layer.handle_of_closure().n.label.name == "model_config"  # type: ignore[attr-defined]
        assert layer.sizes_of_closure()[0].label.name == "model_config"  # type: ignore[attr-defined]
        assert layer.part.keywords["alpha"].label.name == "model_config"
        layer.calls += 1  # what the pass itself counts
    assert type(layer.hidden) is int
    assert type(layer.parts[0]) is int
    assert type(layer.impl.block_size) is int
    assert type(layer.handle_of_closure().n) is int
    assert type(layer.sizes_of_closure()[0]) is int
    assert type(layer.part.keywords["alpha"]) is int
    assert (type(layer.calls), layer.calls) == (int, 6)


def test_integers_are_put_back_after_a_failure() -> None:
    layer = Layer()
    sources = collect(engine_of(layer))
    with pytest.raises(RuntimeError), sources.tainted():
        raise RuntimeError("the forward fails")
    assert type(layer.hidden) is int


def test_tensors_are_known_by_their_memory() -> None:
    """Block size and hidden size are 64 both; each dimension of the cache is told apart."""
    layer = Layer()
    engine = engine_of(layer)
    sources = collect(engine)
    labeller = Labeller(sources.registry, {}, sources.tensors)
    assert names(labeller, layer.kv_cache) == ["engine", "literal", "engine", "model_config"]
    assert names(labeller, layer.weight.data) == ["model_config", "model_config"]
    assert names(labeller, layer.sizes_of_closure()[1]) == ["model_config", "model_config"]
    assert "layer.sizes_of_closure.packed[1]" in sources.origins[Source(MODEL_CONFIG, 512)]
    assert names(labeller, engine.machinery["runner"].blocks) == ["engine", "model_config"]
    assert names(labeller, torch.zeros(48, 64)) == ["engine", "model_config"]  # by value


def test_labels_of_another_pass_do_not_hold() -> None:
    labels = request_labels(59, 9)
    first, second = Labeller({}, labels), Labeller({}, request_labels(61, 11))
    tensor = torch.zeros(59)
    first.stamp(tensor, first.shape(tensor))
    assert names(first, tensor) == ["num_toks"]
    assert names(second, tensor) == ["none"]


# -- sizes of the passes --------------------------------------------------------------------


def sources_of(*values: int) -> Sources:
    sources = Sources()
    for value in values:
        sources.add(MODEL_CONFIG, value, f"config.{value}")
    return sources


def test_passes_change_one_thing_at_a_time() -> None:
    plan = plan_passes(sources_of(8, 64, 128, 4096), 2048, 64)
    (t, r), (t_same, other_r), (other_t, r_same), (held_t, held_r) = (
        plan.labelled, plan.requests, plan.tokens, plan.held_out
    )  # fmt: skip
    assert (t_same, r_same, plan.attempts) == (t, r, 1)
    assert len({r, other_r, held_r}) == 3
    assert len({t, other_t, held_t}) == 3


@pytest.mark.parametrize("sizes", [(4096, 9), (99, 8), (99, 7), (4104, 9)])
def test_sizes_that_collide_are_not_traced(sizes: tuple[int, int]) -> None:
    """A length of the hidden size, a batch of the KV heads, one less, and a prefill of 4096."""
    plan = plan_passes(sources_of(8, 64, 128, 4096), 8192, 64, sizes)
    assert plan.attempts == 2
    assert plan.labelled != sizes


def test_sizes_that_do_not_collide_are_traced() -> None:
    plan = plan_passes(sources_of(8, 64, 128, 4096), 2048, 64, (331, 11))
    assert (plan.labelled, plan.attempts) == ((331, 11), 1)


def test_limits_that_leave_no_sizes() -> None:
    with pytest.raises(TraceError, match="raise max_num"):
        plan_passes(sources_of(*range(2, 300)), 256, 64)
