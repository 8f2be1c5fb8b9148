"""Exports latency models as predictors of SGLang Simulator (``tools/sglang-simulator``).

The result is a folder for each degree of tensor parallelism: an `ml` model
(joblib), a `replay` table (JSON), a simulator configuration for each, and a
manifest with the model's error on steps that it has not seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dooly_backend.config import hardware_for
from dooly_backend.errors import InputError
from dooly_backend.exporters import Manifest, new_folder, write_manifest
from dooly_backend.regression.latency import LatencyModel

from ..common import belonging_together, common_entries, random_batches, write
from ..times import Axes, CallTimes, axes_of
from .features import FEATURES
from .options import HELP, SGLangOptions
from .replay import replay_batches, replay_table

MODEL_FILE, TABLE_FILE = "latency_model.pkl", "replay_table.json"
#: Prompts that a sampled step may hold.
_PREFILLS = 4
_SHORT = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32", "fp8": "FP8", "auto": None}


class SGLangSimulatorExporter:
    """Latency models of one model, one per degree of tensor parallelism, for SGLang Simulator."""

    name = "sglang-simulator"
    description = "SGLang Simulator: the ml (joblib) and replay (JSON) predictors"
    options: Mapping[str, str] = HELP

    def export(
        self, models: Sequence[LatencyModel], out: Path, options: Mapping[str, Any]
    ) -> Manifest:
        """Write models, tables, configurations and the manifest into `out`. Raises InputError."""
        chosen = SGLangOptions.parse(options)
        ordered = belonging_together(models, "SGLang Simulator")
        limits = _limits(axes_of(ordered), chosen)
        files: dict[str, str | bytes] = {}
        predictors: dict[str, Any] = {}
        for model in ordered:
            degree = model.configuration.tensor_parallel
            written, predictors[str(degree)] = _predictors(model, chosen, limits)
            files |= {f"tp{degree}/{name}": content for name, content in written.items()}
        manifest = _manifest(ordered, chosen, limits, predictors)
        with new_folder(out) as folder:
            for name, content in files.items():
                write(folder / name, content)
            return write_manifest(folder, manifest)


#: For `dooly_backend.exporters`, where nothing is installed.
EXPORTERS = {SGLangSimulatorExporter.name: SGLangSimulatorExporter}


def _limits(axes: Axes, chosen: SGLangOptions) -> dict[str, int]:
    """The largest step that is sampled. Raises InputError where nothing was measured."""
    if not (axes.tokens and axes.chunks and axes.sizes):
        raise InputError(
            "the database has no measured prefills or decodes to sample steps among: "
            "run `dooly profile` again, it continues where it stopped"
        )
    seqs = min(axes.sizes[-1], axes.requests[-1] if axes.requests else axes.sizes[-1])
    measured = {
        "max_tokens": min(axes.tokens[-1], axes.chunks[-1]),
        "max_seqs": seqs,
        "max_length": axes.max_length,
    }
    return {name: min(getattr(chosen, name) or most, most) for name, most in measured.items()}


def _predictors(
    model: LatencyModel, chosen: SGLangOptions, limits: Mapping[str, int]
) -> tuple[dict[str, str | bytes], dict[str, Any]]:
    """Files of one degree, and what the manifest says of them."""
    times = CallTimes(model)
    files: dict[str, str | bytes] = {}
    entries: dict[str, Any] = {}
    if "ml" in chosen.predictors:
        from .fit import fit  # scikit-learn takes longer to import than the rest to run

        batches = random_batches(chosen.samples, **limits, seed=chosen.seed, prefills=_PREFILLS)
        fitted = fit(batches, [times.step_us(batch) / 1e6 for batch in batches])
        files[MODEL_FILE] = fitted.pickled()
        files["simulator_ml.json"] = _configuration(
            model, chosen, {"name": "ml", "database_path": MODEL_FILE, "latency_scale": 1.0}
        )
        entries["ml"] = {
            "file": f"tp{model.configuration.tensor_parallel}/{MODEL_FILE}",
            "fitted_steps": fitted.steps,
            "held_out_steps": fitted.held_out,
            "held_out_mape_percent": fitted.mape_percent,
            "held_out_p90_percent": fitted.p90_percent,
            "held_out_worst_percent": fitted.worst_percent,
        }
    if "replay" in chosen.predictors:
        batches = replay_batches(axes_of([model]), limits["max_tokens"], limits["max_seqs"])
        table = replay_table(times, batches)
        files[TABLE_FILE] = json.dumps(table, indent=1) + "\n"
        files["simulator_replay.json"] = _configuration(
            model,
            chosen,
            {
                "name": "replay",
                "database_path": TABLE_FILE,
                "miss_strategy": "knn",
                "miss_knn_k": 1,
            },
        )
        entries["replay"] = {
            "file": f"tp{model.configuration.tensor_parallel}/{TABLE_FILE}",
            "steps": len(table),
        }
    return files, entries


def _configuration(model: LatencyModel, chosen: SGLangOptions, predictor: Mapping[str, Any]) -> str:
    """The simulator's own configuration; what of the machine is not known is left out."""
    known = hardware_for(model.environment.device)
    hardware = chosen.hardware or (known.model_dump() if known else {})
    configuration = model.configuration
    accelerator = {
        "name": hardware.get("name") or model.environment.device,
        "hbm_capacity_gb": hardware.get("memory_gb"),
    }
    dtype = _SHORT.get(configuration.dtype)
    content = {
        "platform": {
            "accelerator": {key: value for key, value in accelerator.items() if value},
            "num_device_per_node": hardware.get("devices_per_node")
            or configuration.tensor_parallel,
        },
        "predictor": dict(predictor),
        "scheduler": {
            "tp_size": configuration.tensor_parallel,
            "ep_size": 1,
            "dp_size": 1,
            "backend_name": "sglang",
            **({"data_type": dtype} if dtype else {}),
            **(
                {"kv_cache_data_type": _SHORT.get(configuration.kv_cache_dtype) or dtype}
                if dtype
                else {}
            ),
        },
    }
    return json.dumps(content, indent=2) + "\n"


def _manifest(
    models: Sequence[LatencyModel],
    chosen: SGLangOptions,
    limits: Mapping[str, int],
    predictors: Mapping[str, Any],
) -> Manifest:
    degree = models[0].configuration.tensor_parallel
    name = chosen.predictors[0]
    notes = [
        "Predictions are of whole steps: operations and the step's own cost. The simulator adds "
        "the host time that its scheduler really takes, some of which is in the step's own cost.",
        "A step is 18 sums and extremes to the ml model; steps that differ in nothing else have "
        "one time. Loading it runs code, as every joblib file does: load none from a stranger.",
    ]
    engine = models[0].environment.engine
    if engine != "sglang":
        notes.append(f"The times are {engine}'s, not SGLang's: measure with SGLang to compare.")
    if not models[0].step_rules.knows_own_cost:
        notes.append("No step cost was fitted: what a step takes beyond its operations is missing.")
    return {
        "format": "sglang-simulator",
        **common_entries(models),
        "command": (
            "SGLANG_USE_CPU_ENGINE=1 python -m sglang_simulator.simulation.sglang.launch_server "
            f'--model-path "$MODEL" --sim-config-path tp{degree}/simulator_{name}.json'
        ),
        "unit": "seconds per step",
        "features": list(FEATURES),
        "ranges": dict(limits),
        "seed": chosen.seed,
        "predictors": dict(predictors),
        **_versions("ml" in chosen.predictors),
        "approximations": notes,
    }


def _versions(fitted: bool) -> dict[str, Any]:
    """What wrote the pickles: scikit-learn promises to read only its own version's."""
    if not fitted:
        return {}
    import joblib
    import numpy
    import sklearn

    versions = {m.__name__: m.__version__ for m in (joblib, numpy, sklearn)}
    return {"pickled_with": versions}
