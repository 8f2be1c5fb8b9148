"""Configurations of models that vLLM runs and transformers does not know by itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)


def register_config(hf_config: Mapping[str, Any]) -> None:
    """Make transformers accept the model type of `hf_config`, where only vLLM knows it.

    Such models (DeepSeek-MoE) bring their configuration class as code on the
    hub. What a class adds is defaults, so a bare one does for a config.json
    that is complete. Types that transformers or vLLM know, and types of
    architectures that vLLM does not run, are left alone.
    """
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.model_executor.models import ModelRegistry
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    model_type = hf_config.get("model_type")
    architectures = set(hf_config.get("architectures") or ())
    if (
        not isinstance(model_type, str)
        or model_type in CONFIG_MAPPING
        or model_type in _CONFIG_REGISTRY
        or not architectures & set(ModelRegistry.get_supported_archs())
    ):
        return
    bare = type(f"{model_type.title()}Config", (PretrainedConfig,), {"model_type": model_type})
    AutoConfig.register(model_type, bare)


def completed(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """`hf_config` with what its transformers class derives from it: `layer_types` and defaults.

    A config.json need not say which layers slide (Gemma-2's does not); the
    class knows. A type that transformers does not know is returned as it is;
    whether the configuration makes sense is vLLM's to say.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = hf_config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return dict(hf_config)
    values = {key: value for key, value in hf_config.items() if key != "model_type"}
    try:
        whole = CONFIG_MAPPING[model_type](**values).to_dict()
    except Exception as error:
        # Whatever its checks raise: vLLM meets the same next and says it in a line of its own.
        log.debug("transformers does not complete this %s config: %s", model_type, error)
        return dict(hf_config)
    text = whole.get("text_config")
    # A class may know a value under another name (GPT-2's n_layer): the given one stays.
    return {**hf_config, **whole, **(text if isinstance(text, dict) else {})}
