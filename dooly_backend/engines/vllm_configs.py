"""Configurations of models that vLLM runs and transformers does not know by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
