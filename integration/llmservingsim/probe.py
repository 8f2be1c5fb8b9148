"""Runs inside a copy of LLMServingSim: asks its loader, look-ups and trace generator.

    python probe.py ROOT < questions.json > answers.json

ROOT is laid out as its repository. This file imports nothing of Dooly's.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

PLACEMENT = {
    "default": {"weights": "LOCAL", "kv_loc": "LOCAL", "kv_evict_loc": "LOCAL"},
    "layer": {},
    "block": [],
}


def main() -> None:
    root = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(root))
    question = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # its log goes to stdout
        answer = ask(root, question)
    json.dump(answer, sys.stdout)


def ask(root: Path, question: dict[str, Any]) -> dict[str, Any]:
    """What it loads, the look-ups in nanoseconds, and the traces of the steps."""
    from serving.core import config_builder, trace_generator, utils
    from serving.core.memory_model import MemoryModel

    trace_generator._PROFILER_ROOT_REL = str(root / "profiler")
    cluster = question["cluster"]
    instance = json.loads((root / cluster).read_text())["nodes"][0]["instances"][0]
    model, degree = instance["model_name"], instance["tp_size"]
    config = utils.get_config(model)
    variant = trace_generator.resolve_variant(instance["dtype"], instance["kv_cache_dtype"], config)
    database = trace_generator._load_perf_db(
        instance["hardware"], model, variant, {degree}, config["model_type"]
    )
    num_npus, tp_size, _, ep_size, _ = config_builder._resolve_parallelism(instance, config)
    memory = MemoryModel(
        model,
        0,
        0,
        num_npus,
        tp_size,
        instance["npu_mem"]["mem_size"],
        512,
        instance["block_size"],
        16,
        False,
        False,
        None,
        None,
        ep_size=ep_size,
        kv_cache_dtype=instance["kv_cache_dtype"],
        npu_memory_utilization=0.9,
    )
    tables = database["tables"][degree]
    return {
        "available": database["available_tps"],
        "layers": sorted([*tables["dense"], *tables["per_sequence"]]),
        "kv_blocks": memory.npu_pool.num_blocks,
        "lookups": [
            lookup(trace_generator, database, degree, kind, arguments)
            for kind, arguments in question["lookups"]
        ],
        "traces": [
            trace(root, instance, number, step) for number, step in enumerate(question["steps"])
        ],
    }


def lookup(module: Any, database: Any, degree: int, kind: str, arguments: list[Any]) -> int:
    """One of its look-ups; ``moe`` has no degree, as it always reads the first."""
    function = getattr(module, f"_lookup_{kind}")
    if kind == "moe":
        return function(database, *arguments)
    if kind == "attention":
        return function(database, degree, *arguments)
    layer, number = arguments
    return function(database, layer, degree, number)


def trace(
    root: Path, instance: dict[str, Any], number: int, step: list[list[int]]
) -> dict[str, Any]:
    """Rows and nanoseconds of its trace of one step of [query, context] requests."""
    from serving.core.request import Batch
    from serving.core.trace_generator import generate_trace

    prefills = [request for request in step if request[0] > 1]
    decodes = [context for query, context in step if query == 1]
    tokens = sum(query for query, _ in step)
    batch = Batch(
        number,
        instance["model_name"],
        tokens,
        sum(decodes),
        [query for query, _ in step],
        [context for _, context in step],
        len(prefills),
        len(decodes),
        [query for query, _ in prefills],
        [context for _, context in prefills],
        decodes,
        0,
        0,
    )
    ranks = instance.get("ep_size", 1)
    generate_trace(
        batch,
        instance["hardware"],
        instance["tp_size"],
        1,
        ranks,
        ranks,
        placement=PLACEMENT,
        dtype=instance["dtype"],
        kv_cache_dtype=instance["kv_cache_dtype"],
        max_num_batched_tokens=instance["max_num_batched_tokens"],
        max_num_seqs=instance["max_num_seqs"],
        inputs_root=str(root / "inputs"),
    )
    path = root / "inputs" / "trace" / instance["hardware"] / instance["model_name"]
    lines = (path / f"instance0_batch{number}.txt").read_text().splitlines()
    return {"rows": int(lines[1]), **read_trace(lines[3:])}


def read_trace(lines: list[str]) -> dict[str, Any]:
    """Names and the nanoseconds of a trace; ranks of a sparse block run side by side."""
    names, total, ranks = [], 0, []
    for line in lines:
        fields = line.split()
        names.append(fields[0])
        if fields[:2] == ["EXPERT", "END"]:
            total += max(ranks, default=0)
            ranks = []
        elif fields[0].startswith("expert"):
            ranks.append(int(fields[1]))
        elif fields[0] != "EXPERT":
            total += int(fields[1])
    return {"names": sorted(set(name.rpartition("_")[0] for name in names)), "ns": total}


if __name__ == "__main__":
    main()
