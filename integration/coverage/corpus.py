"""The configurations of the coverage table, and what each is there to show."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dooly_backend.config import ModelDescription, load_model
from integration.coverage import unseen


@dataclass(frozen=True)
class Case:
    """One row: a model of configs/models, with what is changed of it.

    `settings` are RunOptions; `overrides` replace values of the HF config,
    `without` drops them. Everything runs in bfloat16, as the corpus does.
    """

    model: str
    shows: str
    settings: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        parallel = "".join(
            f" {short}{self.settings[name]}"
            for name, short in (
                ("tensor_parallel", "tp"), ("pipeline_parallel", "pp"), ("expert_parallel", "ep")
            )
            if name in self.settings
        )  # fmt: skip
        return self.model + parallel

    @property
    def description(self) -> ModelDescription:
        """The model with its changes."""
        if self.model in unseen.CONFIGS:
            return ModelDescription(name=self.model, hf_config=unseen.CONFIGS[self.model])
        model = load_model(self.model)
        config = {k: v for k, v in model.hf_config.items() if k not in self.without}
        return ModelDescription(name=model.name, hf_config=config | self.overrides)

    @property
    def changes(self) -> str:
        """What differs from the published configuration, for the table."""
        return ", ".join(
            [f"{name}={value}" for name, value in self.overrides.items()]
            + [f"no {name}" for name in self.without]
        )


CASES = (
    Case("meta-llama/Llama-3.1-8B", "GQA"),
    Case("CohereLabs/c4ai-command-r7b-12-2024", "sliding window and NoPE layers, parallel block"),
    Case("Qwen/Qwen3-30B-A3B", "MoE, QK-norm"),
    Case("meta-llama/Llama-3.1-70B", "one rank of a TP-4 group", {"tensor_parallel": 4}),
    Case("meta-llama/Llama-2-7b-hf", "MHA"),
    Case("deepseek-ai/deepseek-llm-7b-base", "MHA"),
    Case("meta-llama/Meta-Llama-3-8B", "GQA"),
    Case("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "GQA"),
    Case("mistralai/Mistral-7B-v0.3", "GQA"),
    Case("BioMistral/BioMistral-7B", "GQA, sliding window in every layer"),
    Case("mistralai/Ministral-8B-Instruct-2410", "GQA, sliding window"),
    Case("CohereLabs/aya-expanse-8b", "GQA, parallel block"),
    Case("Qwen/Qwen2-7B-Instruct", "GQA, biases"),
    Case("Qwen/Qwen2.5-7B", "GQA, biases"),
    Case("Qwen/Qwen3-8B", "QK-norm"),
    Case("Qwen/Qwen3-0.6B", "QK-norm, tied embeddings"),
    Case("HuggingFaceTB/SmolLM-135M", "GQA with 3 KV heads"),
    Case("meta-llama/Llama-3.2-1B", "GQA, tied embeddings"),
    Case("google/gemma-2-9b", "soft-capping, interleaved sliding window"),
    Case("google/gemma-2-27b", "soft-capping, interleaved sliding window"),
    Case(
        "openai/gpt-oss-20b",
        "MoE, attention sinks, interleaved sliding window",
        without=("quantization_config",),
    ),
    Case("mistralai/Mixtral-8x7B-v0.1", "MoE without shared experts"),
    Case("Qwen/Qwen1.5-MoE-A2.7B", "MoE with shared experts"),
    Case("deepseek-ai/DeepSeek-V2-Lite", "MLA, MoE with shared experts, one dense layer"),
    Case("deepseek-ai/deepseek-moe-16b-base", "MoE with shared experts, one dense layer"),
    Case("Qwen/Qwen3-14B", "QK-norm"),
    Case("Qwen/Qwen2.5-14B", "GQA, biases"),
    Case("Qwen/Qwen2.5-32B", "GQA, biases"),
    Case("meta-llama/Llama-2-13b-hf", "MHA"),
    Case("mistralai/Mixtral-8x7B-v0.1", "one rank of an EP-4 group", {"expert_parallel": 4}),
    Case("meta-llama/Llama-3.1-70B", "first stage of two", {"pipeline_parallel": 2}),
    *(Case(name, "an architecture that no rule was written for") for name in unseen.CONFIGS),
)


def find(names: list[str]) -> list[Case]:
    """The cases called like one of `names`, or else with it in their name; all without names."""
    wanted: set[str] = set()
    for name in map(str.lower, names):
        called = {case.name for case in CASES if case.name.lower() == name}
        wanted |= called or {case.name for case in CASES if name in case.name.lower()}
    return [case for case in CASES if not names or case.name in wanted]
