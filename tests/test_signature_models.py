"""Which models share signatures, on real traces of models with the attention of known ones.

Widths of attention are the models' own; vocabularies, feed-forward layers, contexts and,
where a model lets them differ from the heads', hidden sizes, which attention knows nothing
of, are small. integration/corpus says the same of the whole models.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")

from conftest import signed_elsewhere

SMALL = {
    "vocab_size": 1024,
    "intermediate_size": 256,
    "pad_token_id": 0,
    "max_position_embeddings": 8192,  # the KV cache has room for a request of that length
}
NARROW = {"hidden_size": 512, "head_dim": 128}


def run(model: str, layers: int = 2, **overrides: Any) -> dict[str, Any]:
    return {
        "model": model,
        "overrides": SMALL | overrides,
        "layers": layers,
        "threads": 1,
        "dtype": "float32",  # quick on every processor
    }


RUNS = {
    "llama-3-8b": run("meta-llama/Meta-Llama-3-8B", **NARROW),
    "qwen3-8b": run("Qwen/Qwen3-8B", **NARROW),
    "aya-expanse-8b": run("CohereLabs/aya-expanse-8b"),
    "command-r7b": run("CohereLabs/c4ai-command-r7b-12-2024", layers=4),
    "16/2/128": run(
        "meta-llama/Meta-Llama-3-8B",
        num_attention_heads=16,
        num_key_value_heads=2,
        **NARROW,
    ),
    "qwen1.5-moe": run(
        "Qwen/Qwen1.5-MoE-A2.7B",
        layers=3,
        hidden_size=512,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=8,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=256,
    ),
    "granite": run(
        "ibm-granite/granite-4.0-h-350m",
        layers=4,
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        shared_intermediate_size=256,
    ),
    "llama-3-70b tp4": run("meta-llama/Llama-3.3-70B-Instruct", **NARROW) | {"tensor_parallel": 4},
}

Rows = dict[str, list[Any]]

#: Where a sliding window shows: on the module, its implementation, and as the kernel's argument.
WINDOW = ["attributes.impl.sliding_window", "attributes.sliding_window", "operations"]


@pytest.fixture(scope="module")
def models(needs_engine: None) -> dict[str, Rows]:
    """By model and module path: hash, canonical text, and whether the module holds state."""
    found = signed_elsewhere(list(RUNS.values()))
    return {
        name: {path: rest for path, *rest in rows} for name, rows in zip(RUNS, found, strict=True)
    }


def attention(models: dict[str, Rows], model: str, layer: int = 1) -> Any:
    """The components of the signature of a layer's attention."""
    rows = models[model]
    (text,) = [
        canonical
        for path, (_, canonical, *_) in rows.items()
        if path.startswith(f"model.layers.{layer}.")
        and json.loads(canonical)["name"] == "Attention"
    ]
    return json.loads(text)


def differing(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two canonical serialisations differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            found
            for name in sorted({*one, *other})
            for found in differing(one.get(name), other.get(name), f"{where}.{name}".strip("."))
        ]
    return [] if one == other else [where]


def test_qwen3_8b_and_llama_3_8b_have_one_attention(models: dict[str, Rows]) -> None:
    """32 heads, 8 of keys and values, of size 128; QK-norm makes the query dense."""
    qwen, llama = attention(models, "qwen3-8b"), attention(models, "llama-3-8b")
    assert differing(qwen, llama) == []
    heads = {name: qwen["attributes"][name] for name in ("num_heads", "num_kv_heads", "head_size")}
    assert heads == {"num_heads": 32, "num_kv_heads": 8, "head_size": 128}


def test_a_rank_of_70b_has_the_attention_of_its_heads(models: dict[str, Rows]) -> None:
    rank, whole = attention(models, "llama-3-70b tp4"), attention(models, "16/2/128")
    assert differing(rank, whole) == []
    assert rank["attributes"]["num_heads"] == 16


def test_sliding_and_full_layers_differ(models: dict[str, Rows]) -> None:
    """Command-R7B: three sliding layers, then a full one."""
    sliding = [attention(models, "command-r7b", layer) for layer in range(3)]
    full = attention(models, "command-r7b", 3)
    assert sliding[0] == sliding[1] == sliding[2]
    assert differing(sliding[0], full) == WINDOW


def test_aya_shares_with_full_layers_never_with_sliding_ones(models: dict[str, Rows]) -> None:
    aya = attention(models, "aya-expanse-8b")
    assert differing(aya, attention(models, "llama-3-8b")) == []
    assert differing(aya, attention(models, "command-r7b", 3)) == []
    assert differing(aya, attention(models, "command-r7b", 0)) == WINDOW


def test_identical_moe_layers_have_one_signature(models: dict[str, Rows]) -> None:
    """With shared experts, which keep a result for their layer when they are run alone."""
    found = {
        path: digest
        for path, (digest, canonical, *_) in models["qwen1.5-moe"].items()
        if "routing" in json.loads(canonical)
    }
    assert len(found) == 3
    assert len(set(found.values())) == 1


def test_recurrent_layers_hold_state(models: dict[str, Rows]) -> None:
    """Found by running them, confirmed by the engine's registry; equal layers are one."""
    rows = models["granite"]
    found = {path for path, (_, _, stateful, _) in rows.items() if stateful}
    assert found == {path for path, (_, _, _, registered) in rows.items() if registered}
    mixers = [f"model.layers.{layer}.mamba" for layer in range(3)]
    assert found == {*mixers, "model.layers.3.self_attn.attn"}
    assert len({rows[path][0] for path in mixers}) == 1
    mixer = json.loads(rows[mixers[0]][1])
    assert mixer["name"] == "MambaMixer2"
    assert mixer["stateful"]["backend"] == "MAMBA2_ATTN"
