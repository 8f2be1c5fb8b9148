"""Constants by whose they are: the same architecture in two sizes, under other engine limits.

Usage: python -m integration.coverage.constants [NAME ...] [--out FOLDER]

The differential check sees which sizes the request moves; it cannot tell a
value of the model from one of the engine or from a constant of the code. Here
each family is traced twice with other widths, other engine limits and another
block size. Labels must be the same in both; a literal (and what has no label)
must have kept its size; a size that changed must be labelled with an origin.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from dooly_backend.config import ModelDescription, RunOptions, load_model
from dooly_backend.tracing.trace import Trace

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = {"hidden_size": 384, "intermediate_size": 704, "vocab_size": 3200,
         "num_attention_heads": 6, "num_key_value_heads": 2}  # fmt: skip
OTHER = {"hidden_size": 640, "intermediate_size": 832, "vocab_size": 4800,
         "num_attention_heads": 10, "num_key_value_heads": 5}  # fmt: skip
LIMITS = ({}, {"max_num_seqs": 48, "max_num_batched_tokens": 1536, "block_size": 64})
#: For each family what else sizes it, small and other.
FAMILIES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "meta-llama/Llama-3.1-8B": ({}, {}),
    "Qwen/Qwen3-8B": ({"head_dim": 128}, {"head_dim": 96}),
    "CohereLabs/c4ai-command-r7b-12-2024": ({"head_dim": 64}, {"head_dim": 96}),
    "google/gemma-2-9b": ({"head_dim": 64}, {"head_dim": 96}),
    "openai/gpt-oss-20b": (
        {"head_dim": 64, "intermediate_size": 384, "num_local_experts": 8},
        {"head_dim": 96, "intermediate_size": 640, "num_local_experts": 10},
    ),
    "mistralai/Mixtral-8x7B-v0.1": ({}, {"num_local_experts": 10}),
    "Qwen/Qwen3-30B-A3B": (
        {"head_dim": 64, "num_experts": 16, "moe_intermediate_size": 192},
        {"head_dim": 96, "num_experts": 20, "moe_intermediate_size": 224},
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        {"num_experts": 12, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 704},
        {"num_experts": 15, "moe_intermediate_size": 224, "shared_expert_intermediate_size": 832},
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        {"n_routed_experts": 16, "moe_intermediate_size": 192,
         "num_attention_heads": 16, "num_key_value_heads": 16},
        {"n_routed_experts": 20, "moe_intermediate_size": 224,
         "num_attention_heads": 10, "num_key_value_heads": 10},
    ),
    "deepseek-ai/deepseek-moe-16b-base": (
        {"n_routed_experts": 16, "moe_intermediate_size": 192, "num_key_value_heads": 6},
        {"n_routed_experts": 20, "moe_intermediate_size": 224, "num_key_value_heads": 10},
    ),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--trace", nargs=3, metavar=("MODEL", "VARIANT", "FILE"))
    arguments = parser.parse_args()
    if arguments.trace:
        model, variant, file = arguments.trace
        trace_variant(model, int(variant), Path(file))
        return 0
    wanted = [name.lower() for name in arguments.names]
    rows = [
        compare(model)
        for model in FAMILIES
        if not wanted or any(name in model.lower() for name in wanted)
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "constants.md").write_text(report(rows))
    print(report(rows))
    return 0 if all(not row["wrong"] for row in rows) else 1


def trace_variant(model: str, variant: int, file: Path) -> None:
    """Trace the small or the other size of a family in this process."""
    from dooly_backend.engines import boot
    from dooly_backend.tracing.tracer import trace_model

    hf_config = dict(load_model(model).hf_config)
    hf_config.pop("quantization_config", None)
    if "head_dim" not in FAMILIES[model][variant]:
        hf_config.pop("head_dim", None)
    hf_config |= (SMALL, OTHER)[variant] | FAMILIES[model][variant]
    options = RunOptions.checked(
        model=ModelDescription(name=model, hf_config=hf_config), dtype="bfloat16", threads=1,
        **LIMITS[variant],
    )  # fmt: skip
    with boot(options) as engine:
        trace_model(engine).save(file)


def compare(model: str) -> dict[str, Any]:
    """Labels of both sizes, position by position."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{variant}.json" for variant in (0, 1)]
        for variant, file in enumerate(files):
            subprocess.run(
                [sys.executable, "-m", "integration.coverage.constants", "--trace", model,
                 str(variant), str(file)],
                check=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
        first, second = map(Trace.load, files)
    wrong: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for a, b in zip(first.operations, second.operations, strict=True):
        for dim, other in zip(a.dims(), b.dims(), strict=True):
            counts["sizes"] += 1
            counts["changed"] += dim.size != other.size
            counts[dim.label.name] += dim.size > 1
            if dim.label.bases != other.label.bases:
                wrong[f"{a.name}: {dim} and {other}"] += 1
            elif dim.label.name in ("literal", "none") and dim.size != other.size:
                wrong[f"{a.name}: {dim} changed to {other.size}"] += 1
    return {"model": model, **counts, "wrong": dict(wrong)}


def report(rows: list[dict[str, Any]]) -> str:
    """The comparison as Markdown."""
    lines = [
        "# Constants: the model's, the engine's, or the code's",
        "",
        "Each family traced in two sizes (widths, heads, experts) under two sets of engine limits;",
        "*wrong* are sizes whose label differs between the two, and literals that changed.",
        "",
        "| family | sizes | changed | model_config | engine | literal | wrong |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row["model"], *(row.get(k, 0) for k in
                 ("sizes", "changed", "model_config", "engine", "literal")),
                 sum(row["wrong"].values())]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [f"- {row['model']}: {json.dumps(row['wrong'])}" for row in rows if row["wrong"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
