"""What LLMServingSim has to be told of a model: its layers' sequence and its config.

The simulator knows some model types by a file ``profiler/models/<type>.yaml``;
for others the export brings one. It may only name layers whose tensor sizes the
simulator can compute, so every model has to fit that one shape of a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from dooly_backend.database.records import Configuration, Occurrence
from dooly_backend.errors import InputError

from .mapping import ATTENTION, DENSE, MOE, PER_SEQUENCE, assign

#: Model types with a file of their own in the simulator, and what their blocks have.
KNOWN: Mapping[str, frozenset[str]] = {
    "llama": frozenset(),
    "qwen3": frozenset({"qk_norm"}),
    "mixtral": frozenset({MOE}),
    "phimoe": frozenset({MOE}),
    "qwen3_moe": frozenset({MOE, "qk_norm"}),
}
#: Keys of a config that the simulator reads, and other names for them.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "vocab_size": (),
    "intermediate_size": ("ffn_dim", "n_inner", "moe_intermediate_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Architecture:
    """A model in the simulator's terms. `config` is its HF config with every key that is needed.

    `known`: the simulator has this model type's file. `experts` is 0 for a
    dense model; each token goes to `experts_per_token` of them.
    """

    model_type: str
    known: bool
    qk_norm: bool
    experts: int
    experts_per_token: int
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def sequence(self) -> dict[str, list[str]]:
        qk_norm = ["qk_norm"] if self.qk_norm else []
        dense = ["gate_up_proj", "act_fn", "down_proj"]
        return {
            "prologue": ["embedding"],
            "pre_attn": ["layernorm", "qkv_proj", *qk_norm, "rotary_emb", ATTENTION],
            "post_attn": ["o_proj", "layernorm"],
            "mlp_dense": [] if self.experts else dense,
            "mlp_moe": [MOE] if self.experts else [],
            "head": ["final_layernorm", "lm_head", "sampler"],
        }

    @property
    def layers(self) -> tuple[str, ...]:
        """Every layer of the sequence once, in the order of the pass."""
        return tuple(dict.fromkeys(name for part in self.sequence.values() for name in part))

    @property
    def dense_layers(self) -> tuple[str, ...]:
        return tuple(name for name in self.layers if name in DENSE)

    def yaml(self) -> str:
        """``profiler/models/<model_type>.yaml``. No layer is read from tp1 at other degrees."""
        catalog: dict[str, Any] = {"dense": {}, "per_sequence": {}, "attention": {}}
        for name in self.layers:
            group = name if name in (ATTENTION, MOE) else "dense"
            group = "per_sequence" if name in PER_SEQUENCE else group
            catalog.setdefault(group, {})[name] = {"vllm": "measured-by-dooly"}
        text = yaml.safe_dump({"sequence": self.sequence, "catalog": catalog}, sort_keys=False)
        head = (
            "# Written by dooly-export: the layers of its tables. The simulator reads it; its own\n"
            "# profiler cannot, as the catalog does not name the engine's classes.\n"
        )
        return head + text

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.yaml().encode()).hexdigest()


def architecture_of(
    configuration: Configuration, occurrences: Iterable[Occurrence]
) -> Architecture:
    """Raises InputError for a model that the simulator cannot express."""
    config: Mapping[str, Any] = configuration.hf_config
    config = {**config, **(config.get("text_config") or {})}
    model_type = str(config.get("model_type") or "")
    homes = {assignment.home for assignment in assign(occurrences)}
    _check_expressible(configuration, config, model_type, homes)
    config = {**config, **_needed(config)}
    found = {name for name in (MOE, "qk_norm") if name in homes}
    known = KNOWN.get(model_type)
    if known is not None and (MOE in known) != (MOE in found):
        has, runs = ("", "none") if MOE in known else ("no ", "some")
        raise InputError(
            f"LLMServingSim cannot hold {configuration.model}: its {model_type!r} has {has}experts "
            f"in every block, but the engine runs {runs}"
        )
    experts, per_token, config = _experts(config, MOE in found, configuration.model)
    return Architecture(
        model_type,
        known is not None,
        "qk_norm" in (found if known is None else known),
        experts,
        per_token,
        config,
        tuple(_notes(configuration, config, model_type, homes, known)),
    )


def _check_expressible(
    configuration: Configuration, config: Mapping[str, Any], model_type: str, homes: set[str]
) -> None:
    reason = None
    if not model_type or not model_type.replace("_", "").replace("-", "").isalnum():
        reason = f"its config has no usable model_type ({model_type!r}), which names the layers"
    elif ATTENTION not in homes:
        reason = "its blocks run no attention over a KV cache, which every block needs there"
    elif config.get("kv_lora_rank"):
        reason = "it sizes the KV cache by heads, which latent attention (MLA) does not have"
    elif config.get("is_encoder_decoder"):
        reason = "it has no encoder"
    if reason:
        raise InputError(f"LLMServingSim cannot hold {configuration.model}: {reason}")


def _needed(config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that the simulator needs, under its names. Raises InputError."""
    sizes = {}
    for name, others in NEEDED.items():
        value = next((config[key] for key in (name, *others) if config.get(key)), None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"the model's config has no {name}: LLMServingSim needs it")
        sizes[name] = value
    return sizes


def _experts(
    config: Mapping[str, Any], found: bool, model: str
) -> tuple[int, int, Mapping[str, Any]]:
    """Experts, those of one token, and the config under whose keys the simulator finds them."""
    if not found:
        # Any of these keys makes the simulator look for a sparse block.
        return 0, 0, {key: value for key, value in config.items() if key not in _EXPERTS}
    number = next((config[key] for key in _EXPERTS if config.get(key)), None)
    each = config.get("num_experts_per_tok") or config.get("top_k")
    if not isinstance(number, int) or not isinstance(each, int):
        raise InputError(
            f"LLMServingSim cannot hold {model}: the engine runs experts, but the config says not "
            "how many there are and how many a token goes to"
        )
    known = "num_local_experts" in config or "num_experts" in config
    extra = {} if known else {"num_local_experts": number}
    return number, each, {**config, **extra, "num_experts_per_tok": each}


def _notes(
    configuration: Configuration,
    config: Mapping[str, Any],
    model_type: str,
    homes: set[str],
    known: frozenset[str] | None,
) -> Iterable[str]:
    if known is None:
        yield (
            f"LLMServingSim has no model type {model_type!r}: profiler/models/{model_type}.yaml "
            "describes it with the layers that the simulator has; its blocks are approximated by "
            "the shape of Llama's, its weights' and tensors' sizes likewise."
        )
    if known is not None and "qk_norm" in homes and "qk_norm" not in known:
        yield f"LLMServingSim's {model_type!r} has no QK-norm: its time is in rotary_emb."
    dense = homes & {"gate_up_proj", "act_fn", "down_proj"}
    if MOE in homes and dense:
        yield (
            "Some layers have a dense feed-forward part in place of experts: its time is in moe, "
            "which is the mean of all layers."
        )
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True):
        yield (
            f"Attention has a sliding window of {window} tokens: times are measured with it, the "
            "simulator's KV cache is sized without."
        )
    if configuration.weight_dtype != configuration.dtype:
        yield (
            f"The weights of linear layers are {configuration.weight_dtype}, all else "
            f"{configuration.dtype}: LLMServingSim takes one format for all when it sizes memory"
            + (
                f", also for a KV cache that is {configuration.dtype}."
                if configuration.kv_cache_dtype == "auto"
                else "."
            )
        )
    if configuration.kv_cache_dtype not in ("auto", "fp8"):
        yield (
            f"The KV cache is {configuration.kv_cache_dtype}; LLMServingSim sizes one of 'auto' "
            "or 'fp8'."
        )
