"""What Vidur's tables say of their model and device, and what an export's KV lengths stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dooly_backend.config import hardware_for, known_models, load_model
from dooly_backend.database.records import Environment
from dooly_backend.errors import InputError
from dooly_backend.importers import Wanted, file_digests

from .ranges import Layout, decode_context, round_up
from .sources import Source

#: Layers of the models that Vidur profiles and `configs/models` does not have
#: (vidur/config/model_config.py): no table says them.
LAYERS: Mapping[str, int] = {
    "codellama/CodeLlama-34b-Instruct-hf": 48,
    "internlm/internlm-20b": 60,
    "internlm/internlm2-20b": 48,
    "meta-llama/Meta-Llama-3-70B": 80,
    "microsoft/phi-2": 32,
    "Qwen/Qwen-72B": 80,
}


def environment_of(source: Source) -> Environment:
    known = hardware_for(source.device)
    kind = known.kind if known else "cpu" if "cpu" in source.device.lower() else "cuda"
    facts = {
        "imported_from": "vidur",
        "files": file_digests(source.files, source.root),
        "samples": "the tables' min, median and max: they hold no raw samples",
    }
    written = {"device": "exported_device", "environment": "exported_environment"}
    facts |= {fact: source.manifest[k] for k, fact in written.items() if k in source.manifest}
    return Environment(source.device, kind, "vidur", source.layout, facts)


def model_of(
    source: Source, wanted: Wanted, sizes: Mapping[str, Any]
) -> tuple[dict[str, Any], int]:
    """The HF config as far as it is known, with the tables' own sizes, and its layers."""
    if wanted.config is not None:
        known, layers = wanted.config.hf_config, wanted.config.num_layers
    elif source.model in known_models():
        description = load_model(source.model)
        known, layers = description.hf_config, description.num_layers
    elif source.model in LAYERS:
        known, layers = {}, LAYERS[source.model]
    else:
        raise InputError(
            f"Vidur's tables do not say how many layers {source.model} has: give its Hugging Face "
            "config with --config"
        )
    own = {
        "hidden_size": int(sizes["n_embd"]),
        "intermediate_size": int(sizes["n_expanded_embd"]),
        "num_attention_heads": int(sizes["n_head"]),
        "num_key_value_heads": int(sizes["n_kv_head"]),
        "vocab_size": int(sizes["vocab_size"]),
        "num_hidden_layers": layers,
    }
    if known.get("hidden_size", own["hidden_size"]) != own["hidden_size"]:
        raise InputError(
            f"the tables of {source.model} are of hidden size {own['hidden_size']}, its config "
            f"of {known['hidden_size']}: give the right one with --config"
        )
    return {**known, **own}, layers


@dataclass(frozen=True)
class Lengths:
    """What the KV lengths of rows stand for. Only exports (`own`) relabel them (`Ranges`)."""

    own: bool
    layout: Layout
    granularity: int
    max_length: int

    def history(self, chunk: int, label: int) -> int:
        """Tokens cached before a prefill."""
        if not self.own or self.layout == "repo":
            return label
        rounded = round_up(chunk, self.granularity)
        return 0 if label <= rounded else min(label, self.max_length) - chunk

    def context(self, label: int) -> int:
        """Tokens cached before a decode: in a label's middle, as the export takes them."""
        if not self.own:
            return max(1, label)
        return decode_context(label, self.granularity, self.layout, self.max_length - 1)
