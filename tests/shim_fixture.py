"""FIXTURES, not measurements: models of several kinds whose times come from formulas.

Real configs, the module paths that vLLM has for them, and the costs of
`vidur_fixture`; what every tensor-parallel rank does in full (norms, the
sampler) is one signature at every degree, as it is in a real database.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import vidur_fixture
from vidur_fixture import Operation

from dooly_backend.database.records import Configuration
from dooly_backend.regression.latency import LatencyModel

CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "models"

LLAMA, QWEN3 = "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B"
MIXTRAL, QWEN3_MOE = "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B"

_LAYER = "model.layers.*"
_IN_FULL = ("norm", "sampler", "gate")
_EXPERTS = {"mixtral": f"{_LAYER}.block_sparse_moe", "qwen3_moe": f"{_LAYER}.mlp"}


def hf_config(model: str) -> dict[str, Any]:
    return json.loads((CONFIGS / (model.replace("/", "__") + ".json")).read_text())


def configuration(model: str, tensor_parallel: int = 1) -> Configuration:
    config = hf_config(model)
    return replace(
        vidur_fixture.configuration(tensor_parallel),
        **{
            "model": model,
            "hf_config": config,
            "num_layers": config["num_hidden_layers"],
        },
    )


def operations(model: str, by_routing: bool = False) -> tuple[Operation, ...]:
    """The operations of one step, as vLLM's modules of this model type have them.

    Experts are measured by tokens, or `by_routing`: also by how many of them fire.
    """
    config = hf_config(model)
    model_type = config["model_type"]
    found = [o for o in vidur_fixture.OPERATIONS if not o.path.endswith("q_norm")]
    if model_type.startswith("qwen3"):
        norms = ("q_norm", 7, 0.2), ("k_norm", 6, 0.1)
        found[3:3] = [
            Operation(f"{_LAYER}.self_attn.{name}", "RMSNorm", "tokens", fixed, each)
            for name, fixed, each in norms
        ]
    if model_type in _EXPERTS:
        found = [o for o in found if ".mlp." not in o.path]
        block = _EXPERTS[model_type]
        found += [
            Operation(f"{block}.gate", "ReplicatedLinear", "tokens", 12, 0.2),
            _experts(f"{block}.experts", config, by_routing),
        ]
    if model_type != "llama":
        found = [o for o in found if o.name != "aten::split_with_sizes"]
    return tuple(_in_full(o) for o in found)


def _experts(path: str, config: dict[str, Any], by_routing: bool) -> Operation:
    experts = Operation(path, "FusedMoE", "tokens", 640, 14.0)
    if not by_routing:
        return experts
    number = config.get("num_local_experts") or config["num_experts"]
    return replace(
        experts,
        kind="routing",
        experts=number,
        top_k=config["num_experts_per_tok"],
        each_expert=1600 / number,
    )


def _in_full(operation: Operation) -> Operation:
    name = operation.path.rpartition(".")[2]
    in_full = name.endswith(_IN_FULL) and name not in ("q_norm", "k_norm")
    return replace(operation, divided=not in_full and operation.path not in ("", _LAYER))


def latency_model(
    path: Path, model: str, tensor_parallel: int = 1, by_routing: bool = False
) -> LatencyModel:
    """`model` in the database at `path`."""
    return vidur_fixture.fixture_model(
        path, operations(model, by_routing), config=configuration(model, tensor_parallel)
    )


def latency_models(
    folder: Path, model: str, degrees: tuple[int, ...] = (1, 2), by_routing: bool = False
) -> list[LatencyModel]:
    path = folder / (model.replace("/", "__") + ("-routing.db" if by_routing else ".db"))
    return [latency_model(path, model, degree, by_routing) for degree in degrees]
