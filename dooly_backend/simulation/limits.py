"""The limits of a simulated engine: what is given, and vLLM's defaults for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from dooly_backend.database.records import Configuration, Environment, KvCapacity
from dooly_backend.engines.kv_cache import GIB, number_bytes, token_bytes
from dooly_backend.engines.serving import kv_group
from dooly_backend.errors import InputError
from dooly_backend.simulation.records import KvCacheGroup, ServingLimits

# Defaults of vLLM's server: `EngineArgs.get_batch_defaults`, `vllm/engine/arg_utils.py`
# (0.25.1 line 2397, 0.32 line 2894): accelerators of 70 GiB and more, others, CPUs.
_LARGE = {"max_num_batched_tokens": 8192, "max_num_seqs": 1024}
_OTHER = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
_CPU = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
_LARGE_DEVICES = ("H100", "H200", "H20", "B200", "B300", "MI300", "MI325")
_GPU_MEMORY_UTILIZATION = 0.92  # `vllm/config/cache.py`, in both versions
_CPU_KV_CACHE_GIB = 1.0  # as Dooly's live server takes on a CPU

_FIELDS = {field.name for field in fields(ServingLimits)}


def serving_limits(
    configuration: Configuration,
    environment: Environment,
    given: Mapping[str, Any],
    capacity: KvCapacity | None = None,
) -> ServingLimits:
    """The limits under which `configuration` is served in `environment`.

    `given` has fields of ServingLimits, and `kv_cache_gib`, GiB of KV cache on
    one rank; what is None or missing is vLLM's default. `capacity` is what the
    profile knows of the KV cache. Raises InputError where its size is not known.
    """
    values = {name: value for name, value in given.items() if value is not None}
    gib = values.pop("kv_cache_gib", None)
    unknown = sorted(set(values) - _FIELDS)
    if unknown:
        raise TypeError(f"ServingLimits has no {', '.join(unknown)}")
    cpu = environment.device_kind == "cpu"
    large = any(name in environment.device for name in _LARGE_DEVICES)
    defaults: dict[str, Any] = {
        **(_CPU if cpu else _LARGE if large else _OTHER),
        "max_model_len": int(configuration.facts.get("max_model_len", 4096)),
        "block_size": configuration.block_size,
        # vLLM's CPU platform turns it off (`vllm/platforms/cpu.py`).
        "async_scheduling": not cpu,
        "version": environment.engine_version,
    }
    limits = {**defaults, **values}
    if capacity is not None:
        limits.setdefault("kv_groups", _groups(capacity, limits, configuration.block_size))
    if "num_gpu_blocks" not in limits:
        if gib is None and cpu:
            gib = _CPU_KV_CACHE_GIB
        limits["num_gpu_blocks"] = _blocks(configuration, gib, capacity)
    return ServingLimits(**limits)


def _groups(
    capacity: KvCapacity, limits: Mapping[str, Any], profiled_block_size: int
) -> tuple[KvCacheGroup, ...]:
    caches = limits.get("enable_prefix_caching", True)
    groups = []
    for each in capacity.groups:
        size = each.block_size
        if size == profiled_block_size:
            size = limits["block_size"]
        group = kv_group(each.kind, size, each.sliding_window, caches)
        if each.kind == "MambaSpec" and not caches:
            # One state per request (`mamba_cache_mode` "none").
            group = replace(group, block_size=limits["max_model_len"])
        groups.append(group)
    return () if groups == [KvCacheGroup(limits["block_size"])] else tuple(groups)


def _blocks(configuration: Configuration, gib: float | None, capacity: KvCapacity | None) -> int:
    if capacity is not None:
        wanted = None if gib is None else int(gib * GIB)
        return capacity.num_blocks(_GPU_MEMORY_UTILIZATION, wanted)
    if gib is None:
        raise InputError(
            "the profile does not say how large the KV cache is: give --num-gpu-blocks, as "
            "vLLM prints it when it starts, or --kv-cache-memory"
        )
    return kv_blocks(configuration, gib)


def kv_blocks(configuration: Configuration, gib: float) -> int:
    """Blocks of all layers that `gib` GiB hold on one rank, heads shared among its peers."""
    width = number_bytes(configuration.dtype, configuration.kv_cache_dtype)
    token = token_bytes(configuration.hf_config, configuration.layers_run, width)
    one = token * configuration.block_size
    blocks = int(gib * GIB) * configuration.tensor_parallel // one
    if blocks < 2:
        raise InputError(
            f"{gib:g} GiB of KV cache hold less than two blocks of {configuration.block_size} "
            "tokens: give --kv-cache-memory more"
        )
    return blocks
