"""What tests of the LLMServingSim export share: models, their costs and tables."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import shim_fixture as fixture

from dooly_backend.regression.latency import LatencyModel
from shims.llmservingsim import LLMServingSimExporter
from shims.llmservingsim.architecture import architecture_of
from shims.llmservingsim.costs import LayerCosts
from shims.llmservingsim.grids import choose_grids
from shims.llmservingsim.options import LLMServingSimOptions
from shims.llmservingsim.rules import LLMServingSimRules
from shims.llmservingsim.tables import DegreeTables, build_tables
from shims.times import axes_of

MODELS = (fixture.LLAMA, fixture.QWEN3, fixture.MIXTRAL, fixture.QWEN3_MOE)
PERF = "profiler/perf/FIXTURECPU/meta-llama/Llama-3.1-8B/bf16"


def export(models: list[LatencyModel], out: Path, **options: Any) -> dict[str, Any]:
    return LLMServingSimExporter().export(models, out, options)


def tables_of(
    models: list[LatencyModel], **options: Any
) -> tuple[list[LayerCosts], dict[int, DegreeTables]]:
    architecture = architecture_of(models[0].configuration, models[0].occurrences)
    costs = [LayerCosts(model, architecture) for model in models]
    axes = axes_of(models)
    grids = choose_grids(axes, LLMServingSimOptions(**options))
    return costs, build_tables(costs, grids, axes)


def rules_of(costs: LayerCosts, tables: dict[int, DegreeTables]) -> LLMServingSimRules:
    return LLMServingSimRules(tables, costs.architecture, costs.layers, costs.degree)


def changed(latency: LatencyModel, **values: Any) -> LatencyModel:
    return replace(latency, configuration=replace(latency.configuration, **values))


def with_config(model: LatencyModel, **values: Any) -> LatencyModel:
    config = {**model.configuration.hf_config, **values}
    return changed(model, hf_config={k: v for k, v in config.items() if v is not None})


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
