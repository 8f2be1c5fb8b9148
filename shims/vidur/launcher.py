"""The launcher of an export: run_vidur.py beside the settings it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .costs import StepCosts
from .layout import Placement
from .model import Device, Dimensions
from .ranges import Layout, Ranges, round_up

SCRIPT = "run_vidur.py"
SETTINGS = "launch.json"
#: Names that a run adds to an export.
SCRATCH = ("cache", "simulator_output")
#: vLLM v1 puts running decodes and chunks of prefills into one batch of a limited
#: number of tokens, as Sarathi does.
SCHEDULER = "sarathi"
_PREDICTOR = "random_forrest_execution_time_predictor_config_"
_SCHEDULERS = ("sarathi", "vllm")


def write_launcher(
    folder: Path,
    costs: StepCosts,
    dimensions: Dimensions,
    device: Device,
    ranges: Ranges,
    layout: Layout,
    placement: Placement,
    num_blocks: int,
) -> None:
    """Write the script and its settings into `folder`. Raises OSError."""
    source = Path(__file__).with_name(SCRIPT).read_text("utf-8")
    script = folder / SCRIPT
    script.write_text(source, "utf-8")
    script.chmod(script.stat().st_mode | 0o111)
    settings = {
        "layout": layout,
        "model": _model(dimensions, costs.max_model_len or ranges.max_length),
        "device": {
            "name": device.name,
            "network": device.network,
            "fp16_tflops": device.fp16_tflops,
            "total_memory_gb": device.memory_gb,
            "num_devices_per_node": device.devices_per_node,
        },
        "ranges": {
            "max_length": ranges.max_length,
            "max_chunk": ranges.max_chunk,
            "max_batch": ranges.max_batch,
        },
        "files": placement.flags,
        "datasets": placement.datasets,
        "options": _options(costs, dimensions, device, ranges, layout, num_blocks),
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / SETTINGS).write_text(text + "\n", "utf-8")


def _model(dimensions: Dimensions, max_length: int) -> dict[str, Any]:
    return {
        "name": dimensions.name,
        "num_layers": dimensions.layers,
        "num_q_heads": dimensions.heads,
        "num_kv_heads": dimensions.kv_heads,
        "embedding_dim": dimensions.hidden,
        "mlp_hidden_dim": dimensions.expanded,
        "max_length": max_length,
        "use_gated_mlp": dimensions.gated,
        "use_bias": False,
        "use_qkv_bias": dimensions.qkv_bias,
        # Vidur leaves the post_attention_layernorm column out without it.
        "post_attn_norm": True,
        "vocab_size": dimensions.vocabulary,
    }


def _options(
    costs: StepCosts,
    dimensions: Dimensions,
    device: Device,
    ranges: Ranges,
    layout: Layout,
    num_blocks: int,
) -> dict[str, Any]:
    """Vidur's options that measured tables need, without leading dashes."""
    block_size = costs.model.configuration.block_size
    options: dict[str, Any] = {
        "replica_config_model_name": dimensions.name,
        "replica_config_device": device.name,
        "replica_config_network_device": device.network,
        "replica_config_tensor_parallel_size": costs.model.configuration.tensor_parallel,
        "replica_config_num_pipeline_stages": 1,
        "replica_scheduler_config_type": SCHEDULER,
        "sarathi_scheduler_config_chunk_size": ranges.max_chunk,
        "execution_time_predictor_config_type": "random_forrest",
        "metrics_config_store_plots": False,  # they need Chrome
        "metrics_config_enable_chrome_trace": False,
    }
    for scheduler in _SCHEDULERS:
        options[f"{scheduler}_scheduler_config_batch_size_cap"] = ranges.max_batch
    options["vllm_scheduler_config_max_tokens_in_batch"] = ranges.max_chunk
    cache = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "watermark_blocks_fraction": 0.0,  # vLLM keeps none free
    }
    prefixes = [f"{s}_scheduler_config_" for s in _SCHEDULERS] if layout == "repo" else []
    for prefix in prefixes or ["cache_config_"]:
        options |= {prefix + name: value for name, value in cache.items()}
    return options | _predictor(ranges, layout) | _workload(ranges)


def _predictor(ranges: Ranges, layout: Layout) -> dict[str, Any]:
    options: dict[str, Any] = {
        "kv_cache_prediction_granularity": ranges.granularity,
        "prediction_max_prefill_chunk_size": ranges.max_chunk,
        "prediction_max_batch_size": ranges.max_batch,
        "prediction_max_tokens_per_request": ranges.prediction_max_tokens,
        # Estimates of what is in measured tables.
        "attention_decode_batching_overhead_fraction": 0.0,
        "nccl_cpu_launch_overhead_ms": 0.0,
        # One forest instead of a grid of 27: tables this dense need no search.
        "num_estimators": [50],
        "max_depth": [32],
        "min_samples_split": [2],
        "k_fold_cv_splits": 2,
        "num_training_job_threads": 1,
    }
    if layout == "repo":
        options["attention_prefill_batching_overhead_fraction"] = 0.0
        # The step's own cost is in mlp.csv and attention.csv.
        options["skip_cpu_overhead_modeling"] = True
    return {_PREDICTOR + name: value for name, value in options.items()}


def _workload(ranges: Ranges) -> dict[str, Any]:
    """A small workload within the ranges; Vidur's own default is far outside most."""
    prefill = min(128, ranges.max_length // 2)
    decode = min(32, ranges.max_length // 4)
    options: dict[str, Any] = {
        "request_generator_config_type": "synthetic",
        "synthetic_request_generator_config_num_requests": 20,
        "length_generator_config_type": "fixed",
        "fixed_request_length_generator_config_prefill_tokens": prefill,
        "fixed_request_length_generator_config_decode_tokens": decode,
        "interval_generator_config_type": "poisson",
        "poisson_request_interval_generator_config_qps": 1.0,
    }
    for generator in ("fixed", "uniform", "zipf", "trace"):
        options[f"{generator}_request_length_generator_config_max_tokens"] = ranges.max_length
    return options


def enough_blocks(ranges: Ranges, block_size: int) -> int:
    """Blocks with which the largest batch of the longest requests fits."""
    return ranges.max_batch * (round_up(ranges.max_length, block_size) // block_size + 1)
