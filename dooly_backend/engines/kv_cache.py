"""How large a KV cache the instantiated layers need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GIB = 1 << 30
#: Bytes of a cached number: no KV cache format is wider than the usual two.
_WIDTH = 2


def longest_context(config: Mapping[str, Any]) -> int:
    """Tokens that the engine wants room for: one request of the model's longest context."""
    return int(config.get("max_position_embeddings") or config.get("max_seq_len") or 4096)


def token_bytes(config: Mapping[str, Any], layers: int) -> int:
    """Bytes that one token of `layers` layers takes at most, all heads on one rank.

    Compressed caches (MLA) and sliding windows need less.
    """
    heads = int(config.get("num_attention_heads") or 1)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or int(config.get("hidden_size") or 4096) // heads)
    return layers * 2 * kv_heads * head_dim * _WIDTH


def kv_cache_bytes(config: Mapping[str, Any], layers: int, on_gpu: bool) -> int:
    """Bytes of KV cache to ask for.

    Enough for one request of the longest context, with a tenth to spare for
    the engine's null blocks, and for the batches of a sweep: 1 GiB on a CPU,
    where making a cache takes time, 24 GiB on a GPU.
    """
    longest = longest_context(config) * token_bytes(config, layers) * 11 // 10
    return max((24 if on_gpu else 1) * GIB, longest)
