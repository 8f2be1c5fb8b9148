"""Small records that the tests of the database and of what reads it start from."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dooly_backend.database import Database
from dooly_backend.database.records import (
    Configuration,
    Environment,
    Measurement,
    Occurrence,
    Signature,
)
from dooly_backend.workload import PointKind, WorkloadPoint

H200 = Environment("NVIDIA H200", "cuda", "vllm", "0.25.1", {"driver": "570.1", "torch": "2.9"})
CPU = Environment("AMD EPYC (2 threads)", "cpu", "vllm", "0.25.1", {"threads": 2})

QWEN = Configuration(
    model="Qwen/Qwen3-0.6B",
    hf_config={"hidden_size": 1024, "id2label": {2: "b", 10: "a"}, "time_limit": [0.0, 1e9]},
    engine="vllm",
    backend="FLASH_ATTN",
    dtype="bfloat16",
    kv_cache_dtype="auto",
    block_size=16,
    tensor_parallel=1,
    pipeline_parallel=1,
    execution_mode="eager",
    num_layers=28,
    facts={"head_dim": 128},
)


def signature(name: str, kind: PointKind = "tokens") -> Signature:
    return Signature(name, "module", kind, f'{{"name":"{name}"}}')


LINEAR = signature("QKVParallelLinear")
ATTENTION = signature("Attention", "batch")
SAMPLER = signature("Sampler", "requests")
ROPE = signature("RotaryTable", "constant")

OCCURRENCES = (
    Occurrence(0, "model.rope", "RotaryTable", ROPE, 1),
    Occurrence(1, "model.layers.*.qkv_proj", "QKVParallelLinear", LINEAR, 28, tuple(range(28))),
    Occurrence(2, "model.layers.*.attn", "Attention", ATTENTION, 28, tuple(range(28))),
    Occurrence(3, "sampler", "Sampler", SAMPLER, 1),
)


def at(key: str, *samples_us: float, unstable: bool = False) -> Measurement:
    """A measurement at the point of this key."""
    return Measurement(WorkloadPoint.parse(key), samples_us, unstable)


ALL_MEASURED = {
    ROPE: [at("constant", 1.0)],
    LINEAR: [at("tokens=16", 10.0), at("tokens=32", 18.0)],
    ATTENTION: [at("batch=1x16+0", 5.0), at("batch=4x1+64", 7.0)],
    SAMPLER: [at("requests=1", 3.0, 4.0, 9.0, unstable=True)],
}


def store(
    database: Database,
    measurements: dict[Signature, Sequence[Measurement]],
    *,
    environment: Environment = H200,
    occurrences: Sequence[Occurrence] = OCCURRENCES,
    **changes: Any,
) -> tuple[int, int]:
    """Put a configuration (QWEN with `changes`) and its measurements; their row ids."""
    environment_id = database.add_environment(environment)
    configuration_id = database.add_configuration(
        replace(QWEN, **changes), occurrences, environment_id
    )
    for of, measured in measurements.items():
        for measurement in measured:
            database.record(of, environment_id, measurement, configuration_id)
    return configuration_id, environment_id


def query(path: Path, statement: str) -> list[tuple]:
    """All rows of it, past Dooly's own code."""
    connection = sqlite3.connect(path)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def filled(path: Path, points: int = 500) -> Path:
    """A database with so many points of LINEAR."""
    with Database.open(path, create=True) as database:
        store(database, {LINEAR: [at(f"tokens={n}", *[n / 3] * 20) for n in range(1, points + 1)]})
    return path
