"""`dooly simulate` on a laptop: a database or a bundle in, times out, no engine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from dooly_backend.database import Database
from dooly_backend.database.records import KvCapacity, KvGroup, StepCost
from dooly_backend.errors import InputError
from dooly_backend.simulation.limits import kv_blocks, serving_limits
from dooly_backend.simulation.records import KvCacheGroup
from tests.sample_records import (
    ATTENTION,
    CPU,
    H200,
    LINEAR,
    OCCURRENCES,
    QWEN,
    ROPE,
    SAMPLER,
    at,
    store,
)

Dooly = Callable[..., subprocess.CompletedProcess[str]]

MEASURED = {
    ROPE: [at("constant", 5.0)],
    LINEAR: [at("tokens=1", 10.0), at("tokens=64", 20.0), at("tokens=2048", 300.0)],
    SAMPLER: [at("requests=1", 3.0), at("requests=64", 9.0)],
    ATTENTION: [
        at("batch=1x64+0", 30.0),
        at("batch=1x2048+0", 900.0),
        at("batch=1x64+512", 60.0),
        at("batch=1x2048+512", 1500.0),
        at("batch=1x1+64", 4.0),
        at("batch=64x1+64", 9.0),
        at("batch=1x1+2048", 12.0),
        at("batch=64x1+2048", 99.0),
    ],
}


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "latency.db"
    with Database.open(path, create=True) as database:
        ids = store(database, MEASURED, environment=CPU)
        database.set_step_cost(*ids, StepCost(100.0, 10.0, 1.0))
    return path


@pytest.mark.usefixtures("db")
def test_a_simulation_says_what_it_found(dooly: Dooly) -> None:
    done = dooly("simulate", "Qwen3-0.6B", "--workload", "fixed:requests=20,rate=5", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"] == "Qwen/Qwen3-0.6B"
    assert found["requests"] == 20
    assert 0 < found["tpot_p50_s"] < found["ttft_p50_s"] < found["e2e_p50_s"]
    assert found["output_tokens_per_s"] > 0


def test_a_bundle_gives_the_same_and_needs_no_database(dooly: Dooly, db: Path) -> None:
    workload = ["--workload", "balanced:requests=10", "--json"]
    from_database = json.loads(dooly("simulate", "Qwen3-0.6B", *workload).stdout)
    fitted = dooly("fit", "-o", "bundle.joblib")
    assert fitted.returncode == 0, fitted.stderr
    db.unlink()
    done = dooly("simulate", "Qwen3-0.6B", "--bundle", "bundle.joblib", *workload)
    assert done.returncode == 0, done.stderr
    from_bundle = json.loads(done.stdout)
    for result in (from_database, from_bundle):
        result.pop("seconds")
    assert from_bundle == from_database
    other = dooly("simulate", "smollm-135m", "--bundle", "bundle.joblib")
    assert other.returncode == 2
    assert "Qwen/Qwen3-0.6B" in other.stderr


@pytest.mark.usefixtures("db")
def test_the_same_seed_gives_the_same_run(dooly: Dooly) -> None:
    arguments = ["simulate", "Qwen3-0.6B", "--workload", "balanced:requests=10", "--json"]
    first, second = (json.loads(dooly(*arguments).stdout) for _ in range(2))
    assert first.pop("seconds") > 0
    assert second.pop("seconds") > 0
    assert first == second
    other = json.loads(dooly(*arguments[:-2], "balanced:requests=10,seed=1", "--json").stdout)
    assert other["ttft_mean_s"] != first["ttft_mean_s"]


def test_a_mode_takes_what_was_profiled_in_it(dooly: Dooly, db: Path) -> None:
    slower = at("tokens=1", 1000.0), at("tokens=2048", 3000.0)
    with Database.open(db) as database:
        other = replace(LINEAR, name="slow", canonical='{"name":"slow"}')
        occurrences = [
            replace(each, signature=other) if each.signature == LINEAR else each
            for each in OCCURRENCES
        ]
        store(
            database, {other: slower}, environment=CPU, occurrences=occurrences,
            execution_mode="full_graph",
        )  # fmt: skip
    arguments = ["Qwen3-0.6B", "--workload", "fixed:requests=5,rate=1", "--json"]

    def tpot(*more: str) -> tuple[float, str, str]:
        done = dooly("simulate", *arguments, *more)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        return told["tpot_p50_s"], told["execution_mode"], done.stderr

    graphs, eager = tpot(), tpot("--execution-mode", "eager")
    assert (graphs[1], eager[1]) == ("full_graph", "eager")
    assert graphs[0] > 5 * eager[0]
    assert tpot("--execution-mode", "full_graph") == graphs
    piecewise = tpot("--execution-mode", "piecewise")
    assert piecewise[0] > 5 * eager[0]
    assert "not profiled in mode piecewise: its profile in mode full_graph" in piecewise[2]
    assert dooly("fit", "-o", "bundle.joblib").returncode == 0
    assert tpot("--bundle", "bundle.joblib", "--execution-mode", "eager")[:2] == eager[:2]


@pytest.mark.usefixtures("db")
def test_limits_decide(dooly: Dooly) -> None:
    arguments = ["simulate", "Qwen3-0.6B", "--workload", "fixed:requests=20,arrivals=burst"]
    wide = json.loads(dooly(*arguments, "--json").stdout)
    narrow = json.loads(dooly(*arguments, "--max-num-seqs", "2", "--json").stdout)
    assert narrow["requests_per_step"] <= 2 < wide["requests_per_step"]
    assert narrow["queueing_p90_s"] > wide["queueing_p90_s"]


def test_results_are_written(dooly: Dooly, db: Path) -> None:
    done = dooly("simulate", "Qwen3-0.6B", "--workload", "fixed:requests=5", "-o", "out")
    assert done.returncode == 0, done.stderr
    assert "TTFT" in done.stdout
    out = db.parent / "out"
    steps = pd.read_parquet(out / "steps.parquet")
    parts = [column for column in steps if column.startswith("part_")]
    assert {"part_attention_us", "part_linear_us", "part_host_us"} <= set(parts)
    assert steps[parts].sum(axis=1).to_numpy() == pytest.approx(steps["device_us"].to_numpy())
    assert json.loads((out / "summary.json").read_text())["requests"] == 5
    assert json.loads((out / "trace.json").read_text())["traceEvents"]


@pytest.mark.usefixtures("db")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Qwen3-0.6B", "--workload", "nonsense"], "unknown workload 'nonsense'"),
        (["Qwen3-0.6B", "--environment", "H100"], "environment"),
        (["no-such-model"], "no-such-model"),
        (["Qwen3-0.6B", "--db", "builtin:h200"], "has no model 'Qwen/Qwen3-0.6B'"),
        (["Qwen3-0.6B", "--num-gpu-blocks", "3"], "KV cache holds"),
        (["Qwen3-0.6B", "--kv-cache-memory", "0.0001"], "less than two blocks"),
    ],
)
def test_wrong_input_is_one_line(dooly: Dooly, arguments: list[str], message: str) -> None:
    done = dooly("simulate", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


# -- limits ---------------------------------------------------------------------


def test_defaults_are_vllms_server() -> None:
    large = serving_limits(QWEN, H200, {"num_gpu_blocks": 100, "max_num_seqs": None})
    assert (large.max_num_seqs, large.max_num_batched_tokens) == (1024, 8192)
    assert large.async_scheduling
    cpu = serving_limits(QWEN, CPU, {})
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens) == (128, 2048)
    assert not cpu.async_scheduling
    assert cpu.num_gpu_blocks == kv_blocks(QWEN, 1.0)


def test_what_is_given_goes_before_defaults() -> None:
    limits = serving_limits(QWEN, H200, {"kv_cache_gib": 2.0, "max_num_seqs": 7, "policy": "fcfs"})
    assert limits.max_num_seqs == 7
    assert limits.num_gpu_blocks == kv_blocks(QWEN, 2.0)
    assert kv_blocks(QWEN, 2.0) == 2 * kv_blocks(QWEN, 1.0)
    assert kv_blocks(replace(QWEN, dtype="float32"), 2.0) == kv_blocks(QWEN, 1.0)
    assert kv_blocks(replace(QWEN, kv_cache_dtype="fp8_e4m3"), 1.0) == kv_blocks(QWEN, 2.0)


def test_an_unknown_cache_size_is_asked_for() -> None:
    with pytest.raises(InputError, match="--num-gpu-blocks"):
        serving_limits(QWEN, H200, {})


def test_the_profile_knows_the_size_of_the_cache() -> None:
    capacity = KvCapacity(1 << 20, (), 16 << 30, 141 << 30, 8192, 2 << 30, 1 << 30)
    blocks = (int(0.92 * (141 << 30)) - (19 << 30)) >> 20
    assert serving_limits(QWEN, H200, {}, capacity).num_gpu_blocks == blocks
    given = serving_limits(QWEN, H200, {"kv_cache_gib": 2.0}, capacity)
    assert given.num_gpu_blocks == 2048
    assert serving_limits(QWEN, H200, {"num_gpu_blocks": 77}, capacity).num_gpu_blocks == 77


def groups_of(**given: object) -> tuple[KvCacheGroup, ...]:
    """Of a model with these KV cache groups, as its profile knows them."""
    kinds: dict[str, KvGroup] = {
        "full": KvGroup("FullAttentionSpec", 13, 16, 1 << 12),
        "window": KvGroup("SlidingWindowSpec", 13, 16, 1 << 12, 4096),
        "state": KvGroup("MambaSpec", 13, 16, 1 << 12),
        "chunk": KvGroup("ChunkedLocalAttentionSpec", 13, 16, 1 << 12),
    }
    groups = tuple(kinds[name] for name in str(given.pop("groups")).split())
    capacity = KvCapacity(1 << 20, groups, 1 << 30, 141 << 30, 8192)
    return serving_limits(QWEN, H200, given, capacity).kv_groups


def test_the_profile_knows_the_groups_of_the_cache() -> None:
    assert groups_of(groups="full") == ()
    assert groups_of(groups="full window") == (KvCacheGroup(16), KvCacheGroup(16, 4096))
    assert groups_of(groups="full", block_size=32) == ()
    states = groups_of(groups="full state", enable_prefix_caching=False, max_model_len=999)
    assert states == (KvCacheGroup(16), KvCacheGroup(999))
    for unknown in (groups_of(groups="full state"), groups_of(groups="full chunk")):
        assert unknown[0].unmodelled is None
        assert unknown[1].unmodelled is not None
