"""The three corpora: 7B-8B models, larger ones, and mixture-of-experts models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dooly_backend.config import RunOptions, load_model


@dataclass(frozen=True)
class Case:
    """A model of configs/models, and how it is served."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    corpora: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        degree = self.settings.get("tensor_parallel", 1)
        return self.model.split("/")[-1] + (f" tp{degree}" if degree > 1 else "")

    @property
    def file(self) -> str:
        """Name of the case's result."""
        return self.name.replace(" ", "-") + ".json"

    @property
    def options(self) -> RunOptions:
        """Bfloat16 whatever the file says, as one server would run them all."""
        return RunOptions.checked(
            model=load_model(self.model), dtype="bfloat16", threads=1, **self.settings
        )


SMALL, LARGE, MOE = "7B-8B", "13B-72B", "MoE"
VARIANT, HYBRID = "variant", "hybrid"  # beside the paper's corpora

_TP4 = {"tensor_parallel": 4}

CASES = (
    # Multi-head attention.
    Case("meta-llama/Llama-2-7b-hf", corpora=(SMALL,)),
    Case("deepseek-ai/deepseek-llm-7b-base", corpora=(SMALL,)),
    # Grouped-query attention.
    Case("meta-llama/Meta-Llama-3-8B", corpora=(SMALL,)),
    Case("meta-llama/Llama-3.1-8B", corpora=(SMALL, MOE)),
    Case("Qwen/Qwen2-7B-Instruct", corpora=(SMALL,)),
    Case("Qwen/Qwen2.5-7B", corpora=(SMALL,)),
    Case("Qwen/Qwen3-8B", corpora=(SMALL,)),
    Case("mistralai/Mistral-7B-v0.3", corpora=(SMALL, MOE)),
    Case("CohereLabs/aya-expanse-8b", corpora=(SMALL,)),
    Case("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", corpora=(SMALL,)),
    # Interleaved, or declared as a window that is as long as the context.
    Case("mistralai/Ministral-8B-Instruct-2410", corpora=(SMALL,)),
    Case("CohereLabs/c4ai-command-r7b-12-2024", corpora=(SMALL,)),
    # A reading of Ministral-8B with its alternating layers: beside the twelve.
    Case("mistralai/Ministral-8B-Instruct-2410-interleaved", corpora=(VARIANT,)),
    # Table 11.
    Case("meta-llama/Llama-2-13b-hf", corpora=(LARGE,)),
    Case("Qwen/Qwen2.5-14B", corpora=(LARGE,)),
    Case("Qwen/Qwen3-14B", corpora=(LARGE,)),
    Case("Qwen/Qwen2.5-32B", corpora=(LARGE,)),
    Case("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", corpora=(LARGE,)),
    Case("google/gemma-2-27b", corpora=(LARGE,)),
    Case("meta-llama/Llama-2-70b-hf", _TP4, corpora=(LARGE,)),
    Case("meta-llama/Llama-3.3-70B-Instruct", _TP4, corpora=(LARGE,)),
    Case("Qwen/Qwen2.5-72B", _TP4, corpora=(LARGE,)),
    # Table 13.
    Case("mistralai/Mixtral-8x7B-v0.1", corpora=(MOE,)),
    Case("Qwen/Qwen1.5-MoE-A2.7B", corpora=(MOE,)),
    Case("deepseek-ai/deepseek-moe-16b-base", corpora=(MOE,)),
    Case("deepseek-ai/DeepSeek-V2-Lite", corpora=(MOE,)),
    # Recurrent layers.
    Case("ibm-granite/granite-4.0-h-350m", corpora=(HYBRID,)),
)


@dataclass(frozen=True)
class Corpus:
    """Cases that are profiled one after the other, and what the paper says of its own."""

    name: str
    title: str
    paper: str
    cases: tuple[Case, ...]


def _corpus(name: str, title: str, paper: str) -> Corpus:
    return Corpus(name, title, paper, tuple(case for case in CASES if name in case.corpora))


CORPORA = (
    _corpus(
        SMALL,
        "Twelve models of 7B-8B",
        "612 signatures over 36 configurations (three backends), 100 of them unique; 26.54 h "
        "become 11.58 h: HF-Diff saves 7.9%, HF-Model-Diff 39.8%, Dooly 56.4%",
    ),
    _corpus(
        LARGE,
        "Nine models of 13B-72B",
        "417 signatures over 27 configurations, 329 reused; Dooly saves 62.4% of the hours "
        "(attention 66.2%, linear 39.1%, other 43.7%)",
    ),
    _corpus(
        MOE,
        "Dense and mixture-of-experts models",
        "236 signatures; Dooly saves 61.4% of the hours (attention 60.8%, FusedMoE 72.8%, "
        "linear 47.3%, other 21.0%)",
    ),
)

_TWELVE = CORPORA[0]
#: The twelve, and Ministral-8B read as alternating.
WITH_VARIANT = Corpus(
    "7B-8B with the variant",
    "The twelve and Ministral-8B with one full and three sliding layers in turn",
    "has Ministral-8B among its interleaved models",
    _TWELVE.cases + tuple(case for case in CASES if VARIANT in case.corpora),
)


def find(names: list[str]) -> list[Case]:
    """The cases whose name contains one of `names`, in any case; all without names."""
    wanted = [name.lower() for name in names]
    return [c for c in CASES if not wanted or any(name in c.name.lower() for name in wanted)]
