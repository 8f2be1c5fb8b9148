"""The KV cache that the instantiated layers get."""

from __future__ import annotations

import pytest

from dooly_backend.config import load_model
from dooly_backend.engines.kv_cache import GIB, kv_cache_bytes, number_bytes, token_bytes

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


def test_wide_numbers_get_twice_the_room():
    """Qwen3-0.6B in float32: vLLM refused the cache that was counted as bfloat16's."""
    qwen = load_model("Qwen/Qwen3-0.6B").hf_config
    assert kv_cache_bytes(qwen, 4, False, "float32") > 40960 * 4 * 2 * 8 * 128 * 4 > GIB
    assert kv_cache_bytes(qwen, 4, False, "bfloat16") == kv_cache_bytes(qwen, 4, False) == GIB


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "expected"),
    [
        (None, "auto", 2),
        ("bfloat16", "auto", 2),
        ("float32", "auto", 4),
        ("float32", "bfloat16", 2),
        ("bfloat16", "fp8_e4m3", 1),
        ("bfloat16", "fp8", 1),
    ],
)
def test_bytes_of_a_number(dtype: str | None, kv_cache_dtype: str, expected: int):
    assert number_bytes(dtype, kv_cache_dtype) == expected
