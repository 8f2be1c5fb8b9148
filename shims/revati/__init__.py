"""Exports latency models as the predictor bundle that Revati's publication describes.

Revati's own loader is not public: this is the published contract (a runtime
predictor with Vidur's features), not a file format of its. The bundle holds a
table for each operation, a manifest that describes every one of them, and a
predictor that needs numpy only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dooly_backend.exporters import Manifest, new_folder, write_manifest
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.regression.whole_steps import StepRules

from ..common import belonging_together, common_entries, known_options, write
from .bundle import FEATURES, STATISTICS, Tables, build_tables

SCRIPT = "predictor.py"
HELP: Mapping[str, str] = {}


class RevatiExporter:
    """Latency models of one model, one per degree of tensor parallelism, as a bundle."""

    name = "revati"
    description = "Revati: the published predictor contract (tables and a numpy predictor)"
    options: Mapping[str, str] = HELP

    def export(
        self, models: Sequence[LatencyModel], out: Path, options: Mapping[str, Any]
    ) -> Manifest:
        """Write the tables, the predictor and the manifest into `out`. Raises InputError."""
        known_options(options, HELP, "the Revati export")
        ordered = belonging_together(models, "Revati")
        built = {model.configuration.tensor_parallel: build_tables(model) for model in ordered}
        manifest = _manifest(ordered, built)
        with new_folder(out) as folder:
            for tables in built.values():
                for name, text in tables.files.items():
                    write(folder / name, text)
            write(folder / SCRIPT, Path(__file__).with_name(SCRIPT).read_bytes())
            return write_manifest(folder, manifest)


#: For `dooly_backend.exporters`, where nothing is installed.
EXPORTERS = {RevatiExporter.name: RevatiExporter}


def _manifest(models: Sequence[LatencyModel], built: Mapping[int, Tables]) -> Manifest:
    environment = models[0].environment
    facts = environment.facts
    degrees = {
        str(model.configuration.tensor_parallel): {
            "operations": built[model.configuration.tensor_parallel].operations,
            "tables": built[model.configuration.tensor_parallel].tables,
            "step_cost_us": _step_cost(model),
            "whole_steps": model.step_rules.described(),
        }
        for model in models
    }
    return {
        "format": "revati",
        "contract": "arXiv 2601.00397: a runtime predictor with Vidur's input features",
        **common_entries(models),
        "engine": environment.engine,
        "engine_version": environment.engine_version,
        "backend": models[0].configuration.backend,
        "gpu": environment.device,
        "driver": facts.get("driver"),
        "command": "python -c "
        + json.dumps(
            "from predictor import Predictor; print(Predictor('.').predict_step([(128, 0)]))"
        ),
        "features": FEATURES,
        "target": {
            "columns": list(STATISTICS),
            "unit": "microseconds of one call on one tensor-parallel rank",
            "quantiles": {"min_us": 0.0, "median_us": 0.5, "max_us": 1.0},
            "predicted": "median_us",
            "predictor_unit": "seconds",
        },
        "degrees": degrees,
        "approximations": [
            "Revati has published neither code nor a file format: this is the contract that its "
            "paper describes; no compatibility with its loader is claimed or tested.",
            "Attention of a step is the time of exactly its requests where that was measured "
            "(tables of phase 'batch'), else the sum of its prefills and of as many decodes at "
            "their mean length.",
            _of_steps(models[0].step_rules),
        ],
    }


def _of_steps(rules: StepRules) -> str:
    if rules.knows_whole_steps:
        return (
            "A step takes its operations as whole_steps says, which was fitted to steps of an "
            "engine at its defaults: padded to the next of 'sizes', in the mode of that size; of "
            "operations that are not 'whole' the mode's share, and own_us; at least as long as its "
            "launch."
        )
    return (
        "A step takes the sum of count * operation and step_cost_us, which is what live steps "
        "took beyond their operations"
        + ("." if rules.knows_own_cost else "; none was fitted, so that part is missing.")
    )


def _step_cost(model: LatencyModel) -> dict[str, float]:
    """What a step takes beyond its operations where no whole step was measured."""
    cost = model.step_cost
    if cost is None or model.step_rules.knows_whole_steps:
        return {"constant": 0.0, "per_request": 0.0}
    constant = cost.step_us + cost.layer_us * model.configuration.num_layers
    return {"constant": constant, "per_request": cost.request_us}
