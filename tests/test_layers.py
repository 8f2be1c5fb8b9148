"""Which layers of a model are alike, and how few show every kind."""

from __future__ import annotations

from typing import Any

import pytest

from dooly_backend.config import known_models, load_model
from dooly_backend.engines.layers import layer_kinds, layers_needed, layers_represented
from dooly_backend.errors import InputError

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({}, ["attention/dense"] * 6),
        ({"layer_types": [SLIDING, FULL] * 3}, [f"{SLIDING}/dense", f"{FULL}/dense"] * 3),
        ({"layer_types": [SLIDING] * 9}, [f"{SLIDING}/dense"] * 6),
        ({"layers_block_type": ["mamba", "attention"] * 3}, ["mamba/dense", "attention/dense"] * 3),
        (
            {"sliding_window_pattern": 3, "sliding_window": 4096},
            ["sliding/dense", "sliding/dense", "full/dense"] * 2,
        ),
        ({"sliding_window_pattern": 3, "sliding_window": None}, ["attention/dense"] * 6),
        ({"num_local_experts": 8}, ["attention/moe"] * 6),
        (
            {"n_routed_experts": 64, "first_k_dense_replace": 1, "moe_layer_freq": 1},
            ["attention/dense"] + ["attention/moe"] * 5,
        ),
        ({"num_experts": 8, "decoder_sparse_step": 2}, ["attention/dense", "attention/moe"] * 3),
        (
            {"num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": [0, 3]},
            [f"attention/{k}" for k in ("dense", "moe", "moe", "dense", "moe", "moe")],
        ),
        ({"num_experts": 0}, ["attention/dense"] * 6),
    ],
)
def test_kinds(config: dict[str, Any], kinds: list[str]) -> None:
    assert list(layer_kinds({"num_hidden_layers": 6, **config})) == kinds


@pytest.mark.parametrize(
    ("kinds", "needed"),
    [
        ("aaaaaa", 2),
        ("ababab", 3),  # the first layer is no layer like the others: it has no residual
        ("abbbbb", 2),
        ("aaabaa", 4),
        ("aaaaab", 6),
        ("aa", 2),
        ("a", 1),
    ],
)
def test_as_few_layers_as_show_every_kind(kinds: str, needed: int) -> None:
    assert layers_needed(kinds) == needed
    layers_represented(kinds, needed)  # does not raise
    if needed > 1:
        with pytest.raises(InputError, match="does not show every kind"):
            layers_represented(kinds, needed - 1)


@pytest.mark.parametrize(
    ("kinds", "instantiated", "expected"),
    [
        ("aaaaa", 2, {0: (0,), 1: (1, 2, 3, 4)}),
        ("aaaaa", 3, {0: (0,), 1: (1, 2, 3, 4), 2: ()}),
        ("ababa", 3, {0: (0,), 1: (1, 3), 2: (2, 4)}),
        ("abbab", 4, {0: (0,), 1: (1, 2, 4), 2: (), 3: (3,)}),
        ("a", 1, {0: (0,)}),
    ],
)
def test_what_a_layer_stands_for(
    kinds: str, instantiated: int, expected: dict[int, tuple[int, ...]]
) -> None:
    assert layers_represented(kinds, instantiated) == expected


@pytest.mark.parametrize("name", sorted(known_models()))
def test_every_layer_of_a_known_model_is_represented_once(name: str) -> None:
    model = load_model(name)
    kinds = layer_kinds(model.hf_config)
    assert len(kinds) == model.num_layers
    represented = layers_represented(kinds, layers_needed(kinds))
    stood_for = sorted(layer for layers in represented.values() for layer in layers)
    assert stood_for == list(range(model.num_layers))
    for layer, layers in represented.items():
        assert {kinds[i] for i in layers} <= {kinds[layer]}


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("smollm-135m", 2),
        ("Qwen3-30B-A3B", 2),
        ("DeepSeek-V2-Lite", 2),
        ("gpt-oss-20b", 3),
        ("Ministral-8B-Instruct-2410", 2),
    ],
)
def test_layers_of_known_models(name: str, needed: int) -> None:
    assert layers_needed(layer_kinds(load_model(name).hf_config)) == needed
