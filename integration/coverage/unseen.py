"""Architectures that no rule was written for: small made-up configurations.

The rules were developed on configs/models. These were traced once they were
done, and nothing was changed for them.
"""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 704,
    "vocab_size": 3200,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    return {**_BASE, "model_type": model_type, "architectures": [architecture], **values}


CONFIGS: dict[str, dict[str, Any]] = {
    "small Phi-3": _config("phi3", "Phi3ForCausalLM", original_max_position_embeddings=4096),
    "small Phi-3.5-MoE": _config(
        "phimoe", "PhiMoEForCausalLM", num_local_experts=8, num_experts_per_tok=2,
        attention_bias=True, lm_head_bias=True,
    ),
    "small Gemma-3": _config(
        "gemma3_text", "Gemma3ForCausalLM", head_dim=64, sliding_window=512,
        sliding_window_pattern=3, num_hidden_layers=6, query_pre_attn_scalar=64,
        hidden_activation="gelu_pytorch_tanh",
    ),
    "small OLMo-2": _config("olmo2", "Olmo2ForCausalLM", num_key_value_heads=6),
    "small OLMoE": _config(
        "olmoe", "OlmoeForCausalLM", num_experts=8, num_experts_per_tok=2
    ),
    "small Granite": _config("granite", "GraniteForCausalLM"),
    "small GLM-4": _config(
        "glm4", "Glm4ForCausalLM", head_dim=64, partial_rotary_factor=0.5, attention_bias=True
    ),
    "small StarCoder2": _config(
        "starcoder2", "Starcoder2ForCausalLM", use_bias=True, norm_epsilon=1e-5,
        hidden_act="gelu_pytorch_tanh",
    ),
    "small GPT-2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 384,
        "hidden_size": 384, "n_head": 6, "num_attention_heads": 6, "n_layer": 2,
        "num_hidden_layers": 2, "vocab_size": 3200, "n_positions": 1024,
    },
    "small DeepSeek-V3": _config(
        "deepseek_v3", "DeepseekV3ForCausalLM", num_attention_heads=8, num_key_value_heads=8,
        q_lora_rank=96, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, n_routed_experts=16, n_shared_experts=1, num_experts_per_tok=4,
        n_group=4, topk_group=2, moe_intermediate_size=192, first_k_dense_replace=1,
        scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
}  # fmt: skip
