"""How much memory the full model leaves for its KV cache, by vLLM's own rules.

The instance has few layers. Their cache specs and weights are repeated for the
layers of the full model (or the rank's stage) that they stand for, and vLLM
itself groups the layers and says what a block takes
(``vllm/v1/core/kv_cache_utils.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from dooly_backend.database.records import KvCapacity, KvGroup

_LAYER = re.compile(r"\.(\d+)(?=\.)")
#: So much memory that the bytes of a block follow exactly from the blocks that fit.
_PLENTY = 1 << 90


def kv_capacity(
    runner: Any,
    config: Any,
    stands_for: Mapping[int, tuple[int, ...]],
    max_num_tokens: int,
    largest_step: Callable[[], None],
) -> KvCapacity:
    """Capacity of the rank that `runner` is; `stands_for` maps built layers to full ones.

    `largest_step` runs a step of `max_num_tokens` tokens, whose memory is looked at on a GPU.
    """
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

    groups = get_kv_cache_groups(config, _whole(runner.get_kv_cache_spec(), stands_for))
    blocks = get_kv_cache_config_from_groups(config, groups, _PLENTY).num_blocks
    device_bytes, activation_bytes, other_bytes = _device_memory(largest_step)
    return KvCapacity(
        block_bytes=_PLENTY // blocks if groups else 0,
        groups=tuple(_group(group) for group in groups),
        weight_bytes=_weights(runner.model, stands_for),
        device_bytes=device_bytes,
        max_num_batched_tokens=max_num_tokens,
        activation_bytes=activation_bytes,
        other_bytes=other_bytes,
    )


def _whole(specs: Mapping[str, Any], stands_for: Mapping[int, tuple[int, ...]]) -> dict[str, Any]:
    """The full model's cache specs by layer name, in the order of the layers."""
    whole: list[tuple[int, str, Any]] = []
    for name, spec in specs.items():
        for layer in _represented(name, stands_for):
            full = name if layer is None else _LAYER.sub(f".{layer}", name, count=1)
            whole.append((-1 if layer is None else layer, full, spec))
    whole.sort(key=lambda item: item[0])
    return {name: spec for _, name, spec in whole}


def _represented(
    name: str, stands_for: Mapping[int, tuple[int, ...]]
) -> tuple[int, ...] | tuple[None]:
    """The full model's layers for which what has this name stands; None outside of layers."""
    match = _LAYER.search(name)
    return stands_for.get(int(match.group(1)), ()) if match else (None,)


def _group(group: Any) -> KvGroup:
    spec = group.kv_cache_spec
    return KvGroup(
        kind=type(spec).__name__,
        layers=len(group.layer_names),
        block_size=int(spec.block_size),
        page_bytes=int(spec.page_size_bytes),
        sliding_window=getattr(spec, "sliding_window", None),
    )


def _weights(model: Any, stands_for: Mapping[int, tuple[int, ...]]) -> int:
    """Bytes of the full model's parameters on this rank; shared ones count once."""
    return sum(
        parameter.nbytes * len(_represented(name, stands_for))
        for name, parameter in model.named_parameters()
    )


def _device_memory(largest_step: Callable[[], None]) -> tuple[int, int | None, int | None]:
    """Bytes of the device, of a largest step's activations, and of what is not torch's."""
    import torch

    if not torch.cuda.is_available():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), None, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    largest_step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    free, total = torch.cuda.mem_get_info()
    return total, peak, max(total - free - torch.cuda.memory_reserved(), 0)
