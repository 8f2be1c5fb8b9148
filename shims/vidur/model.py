"""What Vidur has to be told of the model and its device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dooly_backend.config import hardware_for
from dooly_backend.database.records import Configuration, Environment, Occurrence
from dooly_backend.errors import InputError

from ..common import repository_name
from .mapping import EXPERT_PATHS, GATED_PATHS, any_path

#: Of a device whose figures nobody gave. Vidur needs some; `notes` say which are made up.
UNKNOWN_TFLOPS, UNKNOWN_MEMORY_GB = 1.0, 1024.0
#: Of the memory, what vLLM uses by default.
MEMORY_UTILIZATION = 0.9


@dataclass(frozen=True)
class Dimensions:
    """The model, whole (not one rank's share), in Vidur's terms."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    expanded: int  # width of the feed-forward part
    vocabulary: int
    gated: bool
    experts: bool
    qkv_bias: bool


@dataclass(frozen=True)
class Device:
    """The device in Vidur's terms. `notes` say what of it is not known."""

    name: str  # "nvidia_h200"
    fp16_tflops: float
    memory_gb: float
    devices_per_node: int
    notes: tuple[str, ...] = ()

    @property
    def network(self) -> str:
        return self.name + "_node"


def dimensions_of(configuration: Configuration, occurrences: Sequence[Occurrence]) -> Dimensions:
    """Raises InputError for a model whose sizes Vidur refuses or the config does not give."""
    config = configuration.hf_config
    config = {**config, **(config.get("text_config") or {})}
    heads = _size(config, "num_attention_heads", "n_head")
    hidden = _size(config, "hidden_size", "n_embd", "d_model")
    if hidden % heads:
        raise InputError(
            f"Vidur cannot hold {configuration.model}: it needs a hidden size ({hidden}) "
            f"that is a multiple of the attention heads ({heads})"
        )
    expanded = _size(config, "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size")
    return Dimensions(
        name=repository_name(configuration.model),
        layers=configuration.num_layers,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(configuration.facts.get("head_dim") or hidden // heads),
        hidden=hidden,
        expanded=expanded,
        vocabulary=_size(config, "vocab_size"),
        gated=any_path(occurrences, GATED_PATHS),
        experts=any_path(occurrences, EXPERT_PATHS),
        qkv_bias=bool(config.get("attention_bias") or config.get("qkv_bias")),
    )


def device_of(environment: Environment, hardware: Mapping[str, Any] | None, degree: int) -> Device:
    """The device by `hardware` (a description of configs/hardware as a dict), or the shipped one.

    `degree` is the largest tensor-parallel degree. Raises InputError for a
    `hardware` with wrong values.
    """
    if hardware is None:
        known = hardware_for(environment.device)
        hardware = known.model_dump() if known else {}
    notes = []
    tflops = _positive(hardware, "fp16_tflops")
    memory = _positive(hardware, "memory_gb")
    if tflops is None:
        notes.append("fp16_tflops of the device is not known: Vidur's MFU figures mean nothing")
    if memory is None:
        notes.append("memory of the device is not known: Vidur's own memory planner is not used")
    return Device(
        name=slug(environment.device),
        fp16_tflops=tflops or UNKNOWN_TFLOPS,
        memory_gb=memory or UNKNOWN_MEMORY_GB,
        devices_per_node=int(_positive(hardware, "devices_per_node") or max(1, degree)),
        notes=tuple(notes),
    )


def kv_blocks(
    configuration: Configuration, dimensions: Dimensions, device: Device
) -> tuple[int | None, str]:
    """KV-cache blocks of one rank and where the figure is from; None when unknown.

    Vidur would take hidden size / heads for the head size, and leave out the
    embedding; so the export gives it the number of blocks.
    """
    for fact in ("num_gpu_blocks", "num_blocks"):
        if configuration.facts.get(fact):
            return int(configuration.facts[fact]), "the profiled engine's own"
    if device.memory_gb == UNKNOWN_MEMORY_GB:
        return None, "unknown"
    degree = configuration.tensor_parallel
    budget = device.memory_gb * 1e9 * MEMORY_UTILIZATION - 2 * _parameters(dimensions) / degree
    element = 1 if "8" in configuration.kv_cache_dtype else 2
    heads = max(1, dimensions.kv_heads // degree)
    token = 2 * element * heads * dimensions.head_dim * dimensions.layers
    blocks = int(budget // (token * configuration.block_size))
    if blocks < 1:
        raise InputError(
            f"{dimensions.name} does not fit into {device.memory_gb:g} GB at tensor parallel "
            f"{degree}: give num_blocks"
        )
    return blocks, "estimated from the device's memory, 90% of it used, 2 bytes per parameter"


def _parameters(dimensions: Dimensions) -> int:
    """Parameters of a dense model, roughly."""
    attention = 2 * (dimensions.heads + dimensions.kv_heads) * dimensions.head_dim
    feed_forward = (3 if dimensions.gated else 2) * dimensions.expanded
    layers = dimensions.layers * dimensions.hidden * (attention + feed_forward)
    return layers + 2 * dimensions.vocabulary * dimensions.hidden


def slug(text: str) -> str:
    """Lower-case letters, digits and underscores: Vidur lowers the names of its types."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "device"


def _size(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise InputError(f"the model's config has no {names[0]}: Vidur needs it")


def _positive(hardware: Mapping[str, Any], name: str) -> float | None:
    value = hardware.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise InputError(f"hardware: {name} must be a number above zero, not {value!r}")
    return float(value)
