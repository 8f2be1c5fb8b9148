"""How many KV blocks the full model has, told from an instance with few layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY
from sample_records import store

from dooly_backend.database import Database
from dooly_backend.database.check import check_file
from dooly_backend.database.records import KvCapacity, KvGroup
from dooly_backend.errors import InputError
from dooly_backend.regression.latency import LatencyModel

GIB = 1 << 30
FULL = KvGroup("FullAttentionSpec", 30, 16, 6144)
CAPACITY = KvCapacity(30 * 6144, (FULL,), 2 * GIB, 16 * GIB, 2048, GIB, GIB // 2)


def test_blocks_of_a_share_of_the_memory() -> None:
    left = int(16 * GIB * 0.9) - 2 * GIB - GIB - GIB // 2
    assert CAPACITY.num_blocks() == left // (30 * 6144)
    assert CAPACITY.num_blocks(kv_cache_memory_bytes=GIB) == GIB // (30 * 6144)
    assert CAPACITY.num_blocks(0.5) < CAPACITY.num_blocks(0.9)


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(InputError, match=r"no KV block fits: -1\.9. GiB are left"):
        CAPACITY.num_blocks(gpu_memory_utilization=0.1)


def test_a_model_without_attention_has_the_null_block() -> None:
    assert KvCapacity(0, (), GIB, 16 * GIB, 2048).num_blocks() == 1


def test_it_is_stored_with_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "latency.db"
    with Database.open(path, create=True) as database:
        ids = store(database, {})
        assert database.kv_capacity(*ids) is None
        database.set_kv_capacity(*ids, KvCapacity(1, (), 1, 1, 1))
        database.set_kv_capacity(*ids, CAPACITY)
        assert database.kv_capacity(*ids) == CAPACITY
    assert check_file(path).ok


def test_a_profile_keeps_it(profiled: Any, engine: Any) -> None:
    with Database.open(profiled.path, read_only=True) as database:
        model = LatencyModel.load(database)
    assert model.kv_capacity == engine.kv_capacity()
    (group,) = model.kv_capacity.groups
    assert (group.layers, group.block_size) == (30, engine.configuration.block_size)


# -- against vLLM with all layers ------------------------------------------------

RUNS: list[dict[str, Any]] = [
    {"model": "smollm-135m", "layers": 2},
    {"model": "smollm-135m", "layers": 30},
    {"model": "tiny", "hf_config": TINY, "layers": 3},
    {"model": "tiny", "hf_config": TINY, "layers": 4},
]


@pytest.fixture(scope="module")
def runs(needs_engine: None) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("capacity_elsewhere.py")
    done = subprocess.run(
        [sys.executable, str(script), *map(json.dumps, RUNS)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("few", "whole"), [(0, 1), (2, 3)], ids=["uniform", "sliding window"])
def test_few_layers_tell_what_the_whole_model_has(
    runs: list[dict[str, Any]], few: int, whole: int
) -> None:
    def capacity(index: int) -> KvCapacity:
        values = runs[index]["capacity"]
        groups = tuple(KvGroup(**group) for group in values.pop("groups"))
        return KvCapacity(groups=groups, **values)

    told, real = capacity(few), capacity(whole)
    assert told == real
    memory = runs[whole]["kv_cache_memory_bytes"]
    assert told.num_blocks(kv_cache_memory_bytes=memory) == runs[whole]["num_gpu_blocks"]
    assert runs[few]["num_gpu_blocks"] != runs[whole]["num_gpu_blocks"]
    assert told.weight_bytes == runs[whole]["weights"]
