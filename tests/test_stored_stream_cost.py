"""What steps cost at the engine's defaults: kept, and used for predictions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from rich.console import Console

from dooly_backend.database import Database, migrations
from dooly_backend.database.check import check_file
from dooly_backend.database.info_tables import formula, render
from dooly_backend.database.merge import merge
from dooly_backend.database.records import PartCost, StepCost
from dooly_backend.profiling.stream_batches import STREAM_BATCHES
from dooly_backend.regression.bundle import load_bundle
from dooly_backend.regression.step_operations import step_operations
from dooly_backend.regression.store_cost import store_stream_cost
from dooly_backend.regression.stream_cost import time_us
from dooly_backend.simulation.execution import Mode
from dooly_backend.simulation.own_cost import HostCost, NoCost, Shapes, StreamedCost, own_cost
from dooly_backend.simulation.records import Batches
from dooly_backend.simulation.step_time import StepModel
from dooly_backend.workload import Batch
from integration.gpu import step_errors
from integration.gpu.steps import BATCHES
from tests.sample_records import LINEAR, QWEN, at, store
from tests.stream_records import (
    HOSTS,
    RULE,
    TRUTH,
    by_part,
    fill,
    shown,
    steps,
)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "latency.db", create=True) as database:
        yield database


def test_a_simulation_takes_what_a_step_takes(database: Database) -> None:
    _, bundle = fill(database)
    each = bundle.configurations[0]
    model = StepModel.of(each, RULE)
    layers = each.configuration.layers_run
    for batch in (Batch.decode(32, 1500), Batch.prefill(300), Batch.prefill(2048)):
        one = shown(batch, layers, float)
        time = model.time(batch)
        (us,) = step_operations(each.configuration, each.occurrences, each.predictors, [one])
        assert us.us == pytest.approx(model.forward_only().time(batch).device_us)
        assert time.device_us == pytest.approx(time_us(TRUTH[one.mode, "device"], us), rel=0.01)
        host = time.host_us + time.launch_us - (100 + 2 * batch.num_reqs)
        assert host == pytest.approx(one.launch_median_us, rel=0.02)
        assert time.output_us == pytest.approx(40 + batch.num_reqs, rel=0.05)
        parts = model.parts_us(Batches.of([batch]))
        assert float(parts["attention"][0]) == pytest.approx(us.attention_us)
        device = max(time.device_us, time.launch_us)
        total = sum(float(part[0]) for part in parts.values())
        assert total == pytest.approx(device + time.host_us + time.output_us)


def test_a_graph_is_launched_at_once_and_kernels_one_by_one(database: Database) -> None:
    _, bundle = fill(database)
    model = StepModel.of(bundle.configurations[0], RULE)
    layers = bundle.configurations[0].configuration.layers_run
    assert model.time(Batch.decode(8, 500)).launch_us == 0.0
    assert model.time(Batch.prefill(2048)).launch_us == pytest.approx(520 * layers, rel=0.02)
    assert model.time(Batch.prefill(300)).launch_us == pytest.approx(60 * layers, rel=0.02)


def test_bundles_carry_it(database: Database, tmp_path: Path) -> None:
    ids, bundle = fill(database)
    bundle.save(tmp_path / "bundle.joblib")
    costs = load_bundle(tmp_path / "bundle.joblib").configurations[0].stream_cost
    assert costs == bundle.configurations[0].stream_cost != ()
    assert sorted(by_part(costs)) == sorted(by_part(database.stream_cost(*ids)))
    assert len(costs) == 8


def test_the_cost_of_steps_in_a_row_goes_first() -> None:
    serial = StepCost(100.0, 10.0, 1.0)
    stream = (PartCost("full", "device", 0.9, 10.0), PartCost("full", "launch", step_us=5.0))
    assert own_cost(None, 4) == NoCost()
    assert isinstance(own_cost(serial, 4), HostCost)
    assert isinstance(own_cost(serial, 4, stream), StreamedCost)
    # On a CPU launching is computing: such steps say nothing that the others do not.
    assert isinstance(own_cost(serial, 4, stream[1:]), HostCost)


def test_a_mode_whose_launch_bounded_every_step_has_the_others_share() -> None:
    stream = (
        PartCost("full", "device", 0.9, 10.0),
        PartCost("eager", "device", 1.0),
        PartCost("piecewise", "launch", step_us=5.0, layer_us=2.0),
    )
    numbers = np.array([7])
    mode = np.array([Mode.PIECEWISE], np.int8)
    own = own_cost(None, 10, stream).of(Shapes(numbers, numbers, numbers, mode))
    assert own.device_us(np.array([100.0])).tolist() == pytest.approx([95.0])
    assert (own.host_us[0], own.launch_us[0]) == (5.0, 20.0)


def test_errors_on_batches_that_no_fit_has_seen(database: Database, tmp_path: Path) -> None:
    """`integration.gpu.step_errors` on steps that follow the truth: it predicts them."""
    _, bundle = fill(database)
    each = bundle.configurations[0]
    held_out = [shown(batch, layers, float) for layers in (4, 28) for batch in BATCHES]
    sums = step_operations(each.configuration, each.occurrences, each.predictors, held_out)
    about = {"model": QWEN.model, "backend": QWEN.backend, "mode": "full_graph"}
    rows = []
    for step, us in zip(held_out, sums, strict=True):
        interval = max(time_us(TRUTH[step.mode, "device"], us), step.launch_median_us)
        row = {"layers": step.num_layers, "batch": step.batch.key, "interval_us": interval}
        rows.append(json.dumps({**about, **row, "launch_us": step.launch_median_us}))
    (tmp_path / "steps.jsonl").write_text("\n".join(rows))
    command = [
        "--db",
        str(database.path),
        "-o",
        str(tmp_path / "e.csv"),
        str(tmp_path / "steps.jsonl"),
    ]
    result = CliRunner().invoke(step_errors.main, command, catch_exceptions=False)
    assert "forward_only_mape" in result.output
    found = pd.read_csv(tmp_path / "e.csv")
    assert len(found) == len(held_out)
    assert set(found["kind"]) == {"prefill", "decode", "mixed"}
    assert found["error_percent"].abs().max() < 3
    assert (
        found["error_percent"].abs().mean() < 0.5 < found["forward_only_error_percent"].abs().mean()
    )


def test_info_shows_it(database: Database) -> None:
    ids, _ = fill(database)
    info = database.info()
    (stream,) = info.stream
    assert (stream.configuration_id, stream.environment_id) == ids
    assert (stream.steps, stream.depths) == (2 * len(STREAM_BATCHES), (4, 32))
    console = Console(width=140, record=True, file=None)
    with console.capture() as captured:
        console.print(render(info))
    assert "62 steps of 4, 32 layers" in captured.get()
    assert "full device" in captured.get()
    assert formula(TRUTH["full", "launch"]) == "1300 + 20.0 a layer + 1.50 a request"
    assert formula(TRUTH["full", "device"]) == "attention + 0.920 of the rest + 40"


def test_files_with_it_are_united_and_checked(database: Database, tmp_path: Path) -> None:
    ids, _ = fill(database)
    with Database.open(tmp_path / "other.db", create=True) as other:
        there = store(other, {LINEAR: [at("tokens=8", 1.0)]}, execution_mode="full_graph")
        other.record_stream_step(*there, steps()[0])
    into = tmp_path / "all.db"
    merge(into, [tmp_path / "other.db", database.path])
    with Database.open(into, read_only=True) as united:
        assert united.stream_steps(1, 1) == database.stream_steps(*ids)
        assert united.host_steps(1, 1) == HOSTS
        assert united.stream_cost(1, 1) == database.stream_cost(*ids)
    assert check_file(into).ok
    with Database.open(into) as united:
        united._connection.execute("UPDATE stream_step SET launch_median_us = 1 WHERE rowid = 1")
        united._connection.execute("UPDATE host_step SET schedule_us = '[]' WHERE num_reqs = 1")
    problems = check_file(into).problems
    assert len(problems) == 2
    assert "launch_median_us is 1.0" in problems[0]
    assert problems[1].startswith("host_step 1 cannot be read")


def test_samples_of_another_time_are_added(database: Database) -> None:
    ids, _ = fill(database)
    known = database.stream_steps(*ids)
    first = replace(known[0], device_us=(7.0,), alone_us=(9.0,))
    later = replace(first, interval_us=(1.0, 2.0), launch_us=(3.0, 4.0))
    assert not database.record_stream_step(*ids, later)
    assert database.stream_steps(*ids) == known
    assert not database.record_stream_step(*ids, later, add=True)
    kept = {(step.batch, step.num_layers): step for step in database.stream_steps(*ids)}
    assert len(kept) == len(known)
    united = kept.pop((first.batch, first.num_layers))
    assert united.interval_us == (*known[0].interval_us, 1.0, 2.0)
    assert united.launch_us == (*known[0].launch_us, 3.0, 4.0)
    assert (united.device_us, united.alone_us) == ((7.0,), (9.0,))
    assert list(kept.values()) == known[1:]
    new = replace(first, num_layers=5)
    assert database.record_stream_step(*ids, new, add=True)


def test_a_file_of_before_forgets_shares_of_attention(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with Database.open(path, create=True) as database:
        ids, _ = fill(database)
        assert database.stream_cost(*ids)
        assert migrations.latest_version() >= 13
        database._connection.execute(
            "DELETE FROM _sqlite_migrations WHERE name = 'm013_attention_whole'"
        )
        database._connection.execute(f"PRAGMA user_version = {migrations.latest_version() - 1}")
    with Database.open(path) as database:
        assert database.stream_cost(*ids) == ()
        assert len(database.stream_steps(*ids)) == 2 * len(STREAM_BATCHES)
        assert {cost.part for cost in store_stream_cost(database, ids)} >= {"device", "launch"}
        assert database.stream_cost(*ids)


def test_a_file_of_before_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "old.db"
    tables = ("stream_step", "host_step", "stream_cost")
    with Database.open(path, create=True) as database:
        ids = store(database, {LINEAR: [at("tokens=8", 1.0)]})
        for table in tables:
            database._connection.execute(f"DROP TABLE {table}")
        database._connection.execute(
            "DELETE FROM _sqlite_migrations WHERE name IN "
            "('m008_stream_steps', 'm011_lone_steps', 'm013_attention_whole')"
        )
        version = migrations.latest_version() - 3
        database._connection.execute(f"PRAGMA user_version = {version}")
    with Database.open(path) as database:
        assert database.info().schema_version == migrations.latest_version()
        assert database.stream_steps(*ids) == database.host_steps(*ids) == []
        assert database.stream_cost(*ids) == ()
        assert database.record_stream_step(*ids, steps()[0])
        assert not database.record_stream_step(*ids, steps()[0])
        assert len(database.measurements(LINEAR.hash, ids[1])) == 1
    assert check_file(path).ok
