"""How large a KV cache the instantiated layers need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 1 << 30
#: Bytes of a cached number; the engines' own choices ("auto") are two wide.
_WIDTHS = {"float32": 4, "float": 4, "fp8": 1}
_USUAL = 2


def longest_context(config: Mapping[str, Any]) -> int:
    """Tokens that the engine wants room for: one request of the model's longest context."""
    return int(config.get("max_position_embeddings") or config.get("max_seq_len") or 4096)


def number_bytes(dtype: str | None, kv_cache_dtype: str | None = "auto") -> int:
    """Bytes of a cached number: of `kv_cache_dtype`, where that is "auto" the model's `dtype`."""
    cached = dtype if kv_cache_dtype in (None, "auto") else kv_cache_dtype
    # fp8_e4m3, fp8_e5m2, ...: all of one byte
    return _WIDTHS.get((cached or "auto").partition("_")[0], _USUAL)


def token_bytes(config: Mapping[str, Any], layers: int, width: int = _USUAL) -> int:
    """Bytes that one token of `layers` layers takes at most, all heads on one rank.

    A cached number has `width` bytes. Compressed caches (MLA) and sliding windows need less.
    """
    heads = int(config.get("num_attention_heads") or 1)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or int(config.get("hidden_size") or 4096) // heads)
    return layers * 2 * kv_heads * head_dim * width


def kv_cache_bytes(
    config: Mapping[str, Any], layers: int, on_gpu: bool, dtype: str | None = None
) -> int:
    """Bytes of KV cache to ask for, of a model served as `dtype` (None: as the engine likes).

    Enough for one request of the longest context, with a tenth to spare for
    the engine's null blocks, and for the batches of a sweep: 1 GiB on a CPU,
    where making a cache takes time, 24 GiB on a GPU. FP8 caches get as much as
    others: some layers may keep the wider format.
    """
    token = token_bytes(config, layers, number_bytes(dtype))
    longest = longest_context(config) * token * 11 // 10
    return max((24 if on_gpu else 1) * GIB, longest)
