"""Collectives between real processes, and how they come into a call graph."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from sample_records import CPU, LINEAR, OCCURRENCES, at, store
from vidur_fixture import OPERATIONS, fixture_model

from dooly_backend.config import AdaptiveSweep, load_sweep
from dooly_backend.database import Database
from dooly_backend.database.check import check_file
from dooly_backend.database.collectives import measured_collectives
from dooly_backend.errors import EngineError
from dooly_backend.profiling import collectives
from dooly_backend.profiling.collective_calls import (
    collective_calls,
    missing_points,
    occurrences_of,
    points_of,
    record_collectives,
)
from dooly_backend.profiling.collectives import OPERATIONS as NAMES
from dooly_backend.profiling.collectives import Collective, measure_collectives
from dooly_backend.profiling.measure import Regime
from dooly_backend.profiling.plan import Known, plan_of
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.tracing.labels import Dim, Label
from dooly_backend.tracing.trace import Affine, CheckResult, Operation, TensorSpec, Trace
from dooly_backend.workload import Batch, WorkloadPoint
from shims.vidur.costs import StepCosts

QUICK = Regime(repeats=5, warmups=1, rounds=1)
SMOKE = load_sweep("smoke")
POINTS = [WorkloadPoint("tokens", num_tokens=n) for n in (1, 64, 4096)]


def engine(**changes: Any) -> Any:
    values = {
        "layer_kinds": ("a",) * 6,
        "num_layers": 2,
        "stage": range(6),
        "environment": SimpleNamespace(device_kind="cpu"),
        "max_num_tokens": 2048,
        "max_num_reqs": 64,
    }
    return SimpleNamespace(**(values | changes))


# -- real processes --------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 4])
def test_every_collective_is_timed_between_processes(degree: int) -> None:
    wanted = {Collective(name, degree, "bfloat16", 576): POINTS for name in NAMES}
    found = measure_collectives(wanted, QUICK)
    assert list(found) == list(wanted)
    for measurements in found.values():
        assert [m.point for m in measurements] == POINTS
        for measurement in measurements:
            assert len(measurement.samples_us) == QUICK.repeats
            assert min(measurement.samples_us) > 0


@pytest.mark.parametrize("degree", [2, 4])
def test_a_large_collective_takes_longer(degree: int) -> None:
    wide = Collective("all_reduce", degree, "bfloat16", 8192)
    found = measure_collectives({wide: [POINTS[0], POINTS[2]]}, QUICK)
    small, large = found[wide]
    # 64 MiB instead of 16 KiB: no noise of processes that share cores hides that.
    assert large.min_us > 3 * small.min_us


def test_a_process_that_fails_is_one_line() -> None:
    wanted = {Collective("all_to_nobody", 2, "bfloat16", 1): POINTS[:1]}
    with pytest.raises(EngineError, match="ValueError: unknown collective all_to_nobody"):
        measure_collectives(wanted, QUICK)


def test_what_counts_as_one_time() -> None:
    ranks = [[5.0, 9.0], [7.0, 3.0], [6.0, 8.0], [1.0, 1.0]]
    assert collectives._combined("all_reduce", ranks) == [1.0, 1.0]
    assert collectives._combined("gather", ranks) == [5.0, 9.0]
    assert collectives._combined("send_recv", ranks) == [6.0, 9.0]


# -- of a trace ------------------------------------------------------------------

T, R, H, V = 97, 7, 576, 8192


def traced() -> Trace:
    """A tensor-parallel pass of two layers: what vLLM's communicators leave in a trace."""

    def tensor(*sizes: int) -> TensorSpec:
        dims = tuple(Dim(size, Label()) for size in sizes)
        return TensorSpec(dims, "bfloat16", (1,) * len(sizes))

    def op(index: int, path: str, name: str, *sizes: int, scalars: tuple[int, ...] = ()) -> Any:
        numbers = tuple(Dim(n, Label()) for n in scalars)
        return Operation(index, path, name, (tensor(*sizes),), (), numbers)

    reduce = "dooly::all_reduce.tp"
    operations = (
        op(0, "(step)", "dooly::recv.pp", T, H),
        op(1, "model.embed_tokens", reduce, T, H, scalars=(2,)),
        op(2, "model.layers.0.self_attn.o_proj", reduce, T, H, scalars=(2,)),
        op(3, "model.layers.0", "aten::add.Tensor", T, H),
        op(4, "model.layers.1.self_attn.o_proj", reduce, T, H, scalars=(2,)),
        op(5, "logits_processor", "dooly::gather.tp", R, V, scalars=(1, 2)),
        op(6, "(step)", "dooly::send.pp", T, H),
    )
    tokens, requests, width, vocabulary = (
        Affine(0, 1, 0), Affine(0, 0, 1), Affine(H, 0, 0), Affine(V, 0, 0)
    )  # fmt: skip
    formulas = {i: (tokens, width) for i in (1, 2, 4)} | {5: (requests, vocabulary)}
    return Trace("m", T, R, 2, (), operations, CheckResult(0, 0, 0, 0), formulas)


def test_calls_are_counted_for_the_full_model() -> None:
    calls = collective_calls(traced(), engine())
    assert [(c.collective.operation, c.path, c.count, c.layers) for c in calls] == [
        ("send_recv", "", 1, ()),
        ("all_reduce", "model.embed_tokens", 1, ()),
        ("all_reduce", "model.layers.*.self_attn.o_proj", 1, (0,)),
        ("all_reduce", "model.layers.*.self_attn.o_proj", 5, (1, 2, 3, 4, 5)),
        ("gather", "logits_processor", 1, ()),
    ]
    reduced = calls[1].collective
    assert (reduced.degree, reduced.elements, reduced.kind) == (2, H, "tokens")
    assert (calls[4].collective.elements, calls[4].collective.kind) == (V, "requests")
    assert len({call.collective.signature.hash for call in calls}) == 3


def test_a_host_without_enough_devices_measures_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = engine(environment=SimpleNamespace(device_kind="cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert collective_calls(traced(), gpu) == []
    assert "collectives of degree 2 are not measured: this host has 1 devices" in caplog.text
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert {c.collective.backend for c in collective_calls(traced(), gpu)} == {"nccl"}


def test_signatures_tell_what_decides_the_time() -> None:
    one = Collective("all_reduce", 2, "bfloat16", H)
    others = [
        Collective("all_gather", 2, "bfloat16", H),
        Collective("all_reduce", 4, "bfloat16", H),
        Collective("all_reduce", 2, "float32", H),
        Collective("all_reduce", 2, "bfloat16", 2 * H),
        Collective("all_reduce", 2, "bfloat16", H, backend="nccl"),
        Collective("all_reduce", 2, "bfloat16", H, nodes=2),
    ]
    assert len({c.signature.hash for c in (one, *others)}) == 7
    assert one.signature.hash == Collective("all_reduce", 2, "bfloat16", H).signature.hash
    assert json.loads(one.signature.canonical)["topology"] == "1x2"


def test_points_of_a_sweep() -> None:
    tokens, requests = (Collective("gather", 2, "bfloat16", 8, kind) for kind in ("tokens", "requests"))  # fmt: skip  # noqa: E501
    small = engine(max_num_tokens=100, max_num_reqs=8)
    assert [p.num_tokens for p in points_of(tokens, SMOKE, small)] == [1, 16, 64]
    assert [p.num_reqs for p in points_of(requests, SMOKE, small)] == [1, 4]
    adaptive = load_sweep("adaptive")
    assert isinstance(adaptive, AdaptiveSweep)
    assert [p.num_tokens for p in points_of(tokens, adaptive, small)] == [1, 2, 4, 8, 16, 32, 64]


# -- in the database, and out of it ----------------------------------------------


def test_measured_collectives_are_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        collectives,
        "_run",
        lambda degree, backend, items, regime: [[100.0 + n / 10] * 3 for _, _, n in items],
    )
    path = tmp_path / "latency.db"
    calls = [c for c in collective_calls(traced(), engine()) if c.collective.kind == "tokens"]
    graph = [OCCURRENCES[1], *occurrences_of(calls, 1)]
    graph[0] = OCCURRENCES[1].__class__(**{**vars(OCCURRENCES[1]), "position": 0})
    with Database.open(path, create=True) as database:
        ids = store(database, {LINEAR: [at("tokens=64", 10.0)]}, environment=CPU, occurrences=graph)
        missing = missing_points(calls, database, ids[1], SMOKE, engine())
        assert sum(map(len, missing.values())) == 2 * 4
        assert record_collectives(missing, database, ids, QUICK, lambda n: None) == 8
        assert missing_points(calls, database, ids[1], SMOKE, engine()) == {}
        model = LatencyModel.load(database)
    one = 100 + 64 * H / 10
    assert model.operations_us(Batch.prefill(64)) == pytest.approx(28 * 10 + 7 * one + one)
    assert check_file(path).ok
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            "SELECT operation, topology, degree, bytes FROM collective ORDER BY operation, bytes"
        ).fetchall()
    connection.close()
    assert rows[1] == ("all_reduce", "1x2", 2, 16 * H * 2)
    assert len(rows) == 8
    with Database.open(path, read_only=True) as database:
        found = measured_collectives(database)
    assert [(m.operation, m.topology, m.degree, m.bytes) for m in found] == rows
    assert found[1].measurement.median_us == 100 + 16 * H / 10


def test_a_plan_counts_them(tmp_path: Path) -> None:
    """As signatures, with the points of the sweep that the environment lacks."""
    host = engine(environment=CPU, configuration=SimpleNamespace(model="m"))
    calls = [c for c in collective_calls(traced(), engine()) if c.collective.kind == "tokens"]
    with Database.open(tmp_path / "latency.db", create=True) as database:
        _, environment_id = store(database, {}, environment=CPU)
        reduced = next(c.collective for c in calls if c.collective.operation == "all_reduce")
        database.record(reduced.signature, environment_id, at("tokens=16", 90.0))
        known = Known(database)
        first, second = (plan_of(host, [], calls, known, SMOKE) for _ in range(2))
    assert [(p.signature.name, p.count, p.missing, p.points) for p in first.signatures] == [
        ("dooly::send_recv", 1, 4, 4),
        ("dooly::all_reduce", 7, 3, 4),
    ]
    assert (first.occurrences, first.new, first.points) == (8, 2, 7)
    assert first.expected_seconds > 0
    assert (second.known, second.points) == (2, 0)


def test_vidurs_all_reduce_takes_them(tmp_path: Path) -> None:
    """Exports find collectives in the call graph like any other operation."""
    model = fixture_model(tmp_path / "latency.db", OPERATIONS, tensor_parallel=2)
    before = StepCosts(model).home("all_reduce", Batch.prefill(64)).median
    collective = Collective("all_reduce", 2, "bfloat16", 576)
    with Database.open(tmp_path / "latency.db") as database:
        graph = database.occurrences(1, 1)
        (call,) = [c for c in collective_calls(traced(), engine()) if c.count == 5]
        graph += occurrences_of([call], len(graph))
        database.add_configuration(model.configuration, graph, 1)
        database.record(collective.signature, 1, at("tokens=64", 700.0))
        after = StepCosts(LatencyModel.load(database)).home("all_reduce", Batch.prefill(64)).median
    assert after - before == pytest.approx(5 * 0.7)
