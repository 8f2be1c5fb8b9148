"""The KV cache that the instantiated layers get."""

from __future__ import annotations

from dooly_backend.config import load_model
from dooly_backend.engines.kv_cache import GIB, kv_cache_bytes, token_bytes

LLAMA = load_model("meta-llama/Llama-3.1-8B").hf_config


def test_bytes_of_a_token():
    # 8 KV heads of 128 numbers, keys and values, two bytes each
    assert token_bytes(LLAMA, 1) == 2 * 8 * 128 * 2


def test_the_longest_context_fits_at_any_depth():
    for layers in (2, 4, 32):
        assert kv_cache_bytes(LLAMA, layers, on_gpu=False) > 131072 * token_bytes(LLAMA, layers)


def test_never_less_than_a_sweep_needs():
    small = load_model("HuggingFaceTB/SmolLM-135M").hf_config
    assert kv_cache_bytes(small, 2, on_gpu=False) == GIB
    assert kv_cache_bytes(small, 2, on_gpu=True) == 24 * GIB
