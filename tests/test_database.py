from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from sample_records import (
    ALL_MEASURED,
    CPU,
    H200,
    LINEAR,
    OCCURRENCES,
    QWEN,
    ROPE,
    at,
    query,
    signature,
    store,
)

from dooly_backend.database import Database, migrations
from dooly_backend.database.info_tables import render
from dooly_backend.database.records import RunConditions, StepCost, StepMeasurement
from dooly_backend.errors import DatabaseError, InputError
from dooly_backend.workload import Batch, WorkloadPoint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "latency.db"


@pytest.fixture
def database(path: Path) -> Iterator[Database]:
    with Database.open(path, create=True) as database:
        yield database


# -- environments and configurations


def test_records_come_back_equal(database: Database) -> None:
    configuration_id, environment_id = store(database, {})
    assert database.environments() == {environment_id: H200}
    stored = database.configurations()[configuration_id]
    assert stored.digest == QWEN.digest  # integer keys of hf_config are text by now
    assert stored.facts == QWEN.facts
    assert database.occurrences(configuration_id) == list(OCCURRENCES)
    assert database.signatures() == {s.signature.hash: s.signature for s in OCCURRENCES}


def test_adding_again_changes_nothing(database: Database, path: Path) -> None:
    first = store(database, ALL_MEASURED)
    counts = [query(path, f"SELECT count(*) FROM {t}") for t in ("occurrence", "measurement")]
    assert store(database, ALL_MEASURED) == first
    assert counts == [
        query(path, f"SELECT count(*) FROM {t}") for t in ("occurrence", "measurement")
    ]


def test_two_environments_and_configurations_stay_apart(database: Database) -> None:
    assert database.add_environment(H200) != database.add_environment(CPU)
    assert database.add_environment(H200) != database.add_environment(
        replace(H200, facts={"driver": "580"})
    )
    one = database.add_configuration(QWEN, OCCURRENCES)
    other = database.add_configuration(replace(QWEN, tensor_parallel=2), OCCURRENCES[:1])
    assert one != other
    assert database.occurrences(one) == list(OCCURRENCES)
    assert database.occurrences(other) == list(OCCURRENCES[:1])


def test_changed_occurrences_replace_the_stored_ones(database: Database) -> None:
    configuration_id, environment_id = store(database, ALL_MEASURED)
    changed = [*OCCURRENCES[1:3], replace(OCCURRENCES[3], count=2, signature=signature("Other"))]
    facts = {"head_dim": 64}
    again = replace(QWEN, facts=facts)
    assert database.add_configuration(again, changed, environment_id) == configuration_id
    assert database.occurrences(configuration_id, environment_id) == changed
    assert database.configurations()[configuration_id].facts == facts
    assert database.measurements(ROPE.hash, environment_id)  # what is measured stays


def test_occurrences_come_in_the_order_of_the_pass(database: Database) -> None:
    configuration_id = database.add_configuration(QWEN, OCCURRENCES[::-1])
    assert [o.position for o in database.occurrences(configuration_id)] == [0, 1, 2, 3]


def test_a_refused_occurrence_leaves_nothing_of_its_configuration(database: Database) -> None:
    twice = [*OCCURRENCES, replace(OCCURRENCES[0], path="elsewhere")]
    with pytest.raises(DatabaseError, match="occurrence_by_place"):
        database.add_configuration(QWEN, twice)
    assert database.configurations() == {}
    assert database.signatures() == {}


# -- measurements


def test_samples_come_back_exactly(database: Database) -> None:
    samples = (1 / 3, 12345.678901234567, 1e-9, 7.0)
    _, environment_id = store(database, {LINEAR: [at("tokens=8", *samples, unstable=True)]})
    assert database.measurements(LINEAR.hash, environment_id) == [
        at("tokens=8", *samples, unstable=True)
    ]


def test_samples_may_be_numpy_numbers(database: Database) -> None:
    samples = tuple(np.array([1.5, 2.5], dtype=np.float32))
    _, environment_id = store(database, {LINEAR: [at("tokens=8", *samples)]})
    assert database.measurements(LINEAR.hash, environment_id) == [at("tokens=8", 1.5, 2.5)]


@pytest.mark.parametrize("samples", [(), (1.0, float("nan")), (float("inf"),), (-1.0,)])
def test_samples_that_are_no_times_are_refused(database: Database, samples: tuple) -> None:
    environment_id = database.add_environment(H200)
    with pytest.raises(InputError, match="tokens=8"):
        database.record(LINEAR, environment_id, at("tokens=8", *samples))
    assert database.settled_points(LINEAR.hash, environment_id) == set()


def test_statistics_are_stored_beside_the_samples(database: Database, path: Path) -> None:
    store(database, {LINEAR: [at("tokens=8", 1.0, 2.0, 3.0, 4.0, 10.0)]})
    columns = "name, point, num_tokens, n, min_us, p25_us, median_us, mean_us, max_us, std_us"
    row = query(path, f"SELECT {columns} FROM latency")[0]
    assert row[:-1] == ("QKVParallelLinear", "tokens=8", 8, 5, 1.0, 2.0, 3.0, 4.0, 10.0)
    assert row[-1] == pytest.approx(10**0.5)
    assert query(path, "SELECT device, environment_id, configuration_id FROM latency") == [
        ("NVIDIA H200", 1, 1)
    ]


def test_the_first_measurement_of_a_point_is_kept(database: Database) -> None:
    environment_id = database.add_environment(H200)
    assert database.record(LINEAR, environment_id, at("tokens=8", 1.0))
    assert not database.record(LINEAR, environment_id, at("tokens=8", 2.0))
    assert database.measurements(LINEAR.hash, environment_id) == [at("tokens=8", 1.0)]


def test_replace_takes_the_new_measurement(database: Database) -> None:
    environment_id = database.add_environment(H200)
    database.record(LINEAR, environment_id, at("tokens=8", 1.0))
    assert database.record(LINEAR, environment_id, at("tokens=8", 2.0, 3.0), replace=True)
    assert database.measurements(LINEAR.hash, environment_id) == [at("tokens=8", 2.0, 3.0)]


def test_what_a_measurement_cost_is_kept_and_grows(database: Database) -> None:
    ids = store(database, {LINEAR: [at("tokens=16", 10.0)]})
    costly = replace(at("tokens=32", 18.0), timing_us=250.0)
    database.record(LINEAR, ids[1], costly, ids[0])
    assert database.timing_us(ids[1]) == {(LINEAR.hash, "tokens=32"): 250.0}
    database.add_timing(LINEAR.hash, ids[1], costly.point, 500.0)
    database.add_timing(LINEAR.hash, ids[1], at("tokens=16").point, 30.0)  # since somebody looks
    found = {(LINEAR.hash, "tokens=32"): 750.0, (LINEAR.hash, "tokens=16"): 30.0}
    assert database.timing_us(ids[1]) == found
    again = replace(at("tokens=32", 6.0), timing_us=40.0)
    database.record(LINEAR, ids[1], again, replace=True)  # it was timed twice
    assert database.timing_us(ids[1]) == found | {(LINEAR.hash, "tokens=32"): 790.0}
    database.record(LINEAR, ids[1], at("tokens=32", 5.0), replace=True)  # nobody looked
    database.record(LINEAR, ids[1], replace(costly, samples_us=(7.0,)))  # known: left out
    assert database.timing_us(ids[1]) == {(LINEAR.hash, "tokens=16"): 30.0}
    assert [m.samples_us for m in database.measurements(LINEAR.hash, ids[1])] == [(10.0,), (5.0,)]


def test_environments_do_not_share_measurements(database: Database) -> None:
    here, there = database.add_environment(H200), database.add_environment(CPU)
    database.record(LINEAR, here, at("tokens=8", 1.0))
    assert database.settled_points(LINEAR.hash, there) == set()
    assert database.measurements(LINEAR.hash, there) == []
    assert database.record(LINEAR, there, at("tokens=8", 50.0))


def test_measurements_come_small_points_first(database: Database) -> None:
    sizes = [512, 8, 64, 1024, 16]
    _, environment_id = store(database, {LINEAR: [at(f"tokens={n}", 1.0) for n in sizes]})
    points = [m.point.num_tokens for m in database.measurements(LINEAR.hash, environment_id)]
    assert points == sorted(sizes)


def test_a_point_must_suit_its_signature(database: Database) -> None:
    environment_id = database.add_environment(H200)
    with pytest.raises(ValueError, match="requests=8"):
        database.record(LINEAR, environment_id, at("requests=8", 1.0))
    with pytest.raises(ValueError, match="constant"):
        database.skip(LINEAR, environment_id, WorkloadPoint("constant"), "no memory")


def test_a_signature_cannot_change_what_it_depends_on(database: Database) -> None:
    environment_id = database.add_environment(H200)
    database.record(LINEAR, environment_id, at("tokens=8", 1.0))
    with pytest.raises(DatabaseError, match=r"tokens.*not as QKVParallelLinear \(module, requests"):
        database.record(replace(LINEAR, kind="requests"), environment_id, at("requests=8", 1.0))


def test_an_unknown_environment_is_refused_without_a_trace(database: Database) -> None:
    with pytest.raises(DatabaseError, match="FOREIGN KEY"):
        database.record(LINEAR, 99, at("tokens=8", 1.0))
    assert database.signatures() == {}


# -- skipped points


def test_a_skipped_point_is_settled_with_its_reason(database: Database) -> None:
    environment_id = database.add_environment(H200)
    point = WorkloadPoint.parse("tokens=65536")
    assert database.skip(LINEAR, environment_id, point, "out of memory")
    assert database.skip(LINEAR, environment_id, point, "longer than max_model_len")
    database.record(LINEAR, environment_id, at("tokens=8", 1.0))
    assert database.settled_points(LINEAR.hash, environment_id) == {"tokens=8", "tokens=65536"}
    skipped = database.skipped(LINEAR.hash, environment_id)
    assert [(s.point, s.reason) for s in skipped] == [(point, "longer than max_model_len")]


def test_a_point_is_measured_or_skipped_never_both(database: Database) -> None:
    environment_id = database.add_environment(H200)
    point = WorkloadPoint.parse("tokens=8")
    database.skip(LINEAR, environment_id, point, "out of memory")
    assert database.record(LINEAR, environment_id, at("tokens=8", 1.0))
    assert database.skipped(LINEAR.hash, environment_id) == []
    assert not database.skip(LINEAR, environment_id, point, "out of memory")
    assert database.skipped(LINEAR.hash, environment_id) == []


# -- steps


def test_steps_and_their_cost_come_back(database: Database) -> None:
    ids = store(database, {})
    step = StepMeasurement(Batch.parse("2x128+0,8x1+1024"), 2, (900.0, 905.5), 700.25)
    more = replace(step, num_layers=4)
    assert all([database.record_step(*ids, more), database.record_step(*ids, step)])
    assert database.steps(*ids) == [step, more]
    assert not database.record_step(*ids, replace(step, operations_us=1.0))
    assert database.steps(*ids)[0] == step
    assert database.record_step(*ids, replace(step, operations_us=1.0), replace=True)
    assert database.steps(*ids)[0].operations_us == 1.0

    assert database.step_cost(*ids) is None
    database.set_step_cost(*ids, StepCost(1.0, 2.0, 3.0))
    database.set_step_cost(*ids, StepCost(100.0, 20.0, 0.5))
    assert database.step_cost(*ids) == StepCost(100.0, 20.0, 0.5)


# -- info and views


def test_info_counts_what_is_there(database: Database, path: Path) -> None:
    first, environment_id = store(database, ALL_MEASURED)
    second, _ = store(
        database, {}, tensor_parallel=2, occurrences=[*OCCURRENCES[:2], replace(
            OCCURRENCES[2], signature=signature("Unmeasured"))]
    )  # fmt: skip
    database.skip(LINEAR, environment_id, WorkloadPoint.parse("tokens=99"), "out of memory")
    database.add_environment(CPU)
    info = database.info()

    assert (info.path, info.schema_version) == (str(path), migrations.latest_version())
    assert info.size_bytes >= path.stat().st_size > 0
    assert [(e.environment, e.measurements) for e in info.environments] == [(H200, 6), (CPU, 0)]
    assert [
        (c.id, c.configuration.tensor_parallel, c.occurrences, c.signatures)
        for c in info.configurations
    ] == [(first, 1, 4, 4), (second, 2, 3, 3)]
    assert [[(p.measured, p.complete) for p in c.coverage] for c in info.configurations] == [
        [(4, True)],
        [(2, False)],
    ]
    assert {(s.granularity, s.kind): s.count for s in info.signatures} == {
        ("module", "batch"): 1,
        ("module", "constant"): 1,
        ("module", "requests"): 1,
        ("module", "tokens"): 2,
    }
    assert (info.measurements, info.unstable) == (6, 1)
    assert [(s.name, s.point, s.reason) for s in info.skipped] == [
        (LINEAR.name, "tokens=99", "out of memory")
    ]
    assert {(s.name, s.configuration_ids) for s in info.shared} == {
        (ROPE.name, (first, second)),
        (LINEAR.name, (first, second)),
    }


def test_info_prints_and_is_json(database: Database) -> None:
    configuration_id, environment_id = store(database, ALL_MEASURED, model="odd [/model] name")
    database.skip(LINEAR, environment_id, WorkloadPoint.parse("tokens=99"), "out of memory")
    busy = {"captured_steps": 7, "suspicious": 2, "others_busy_processors": [0.1, 0.25, 1.5]}
    slowed = {"captured_steps": 9, "clock_mhz": [1395, 1965, 1980], "throttled": {"power cap": 3}}
    for start, facts in (("2026-01-02T10:00:00.5+00:00", slowed), ("2026-01-01T10:00", busy)):
        run = RunConditions(start, start, facts)
        database.record_run(configuration_id, environment_id, run)
    assert [r.run.facts for r in database.info().runs] == [busy, slowed]
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(database.info()))
    text = console.export_text()
    console.file.close()
    for expected in (
        "odd [/model] name", "NVIDIA H200: complete", "out of memory", "6 measure",
        "2026-01-02 10:00:00", "7, 2 suspicious", "0.1 / 0.25 / 1.5", "1395 / 1965 / 1980",
        "power cap (3)",
    ):  # fmt: skip
        assert expected in text
    assert json.loads(json.dumps(dataclasses.asdict(database.info())))["measurements"] == 6


def test_views_answer_common_questions(database: Database, path: Path) -> None:
    _, environment_id = store(database, ALL_MEASURED)
    database.skip(LINEAR, environment_id, WorkloadPoint.parse("tokens=99"), "out of memory")
    assert query(
        path, "SELECT points, unstable, skipped FROM known_signature WHERE name LIKE 'QKV%'"
    ) == [(2, 0, 1)]
    assert query(
        path, "SELECT model, device, signatures, measured, complete FROM configuration_coverage"
    ) == [(QWEN.model, "NVIDIA H200", 4, 4, 1)]
    assert query(path, "SELECT * FROM shared_signature") == []


def test_each_environment_has_its_own_call_graph(database: Database) -> None:
    """Another device runs other kernels: its graph must not take the place of the first one's."""
    configuration_id, here = store(database, ALL_MEASURED)
    there = database.add_environment(CPU)
    other = [replace(OCCURRENCES[1], position=0, signature=signature("OtherKernels"))]
    assert database.add_configuration(QWEN, other, there) == configuration_id
    assert database.occurrences(configuration_id, here) == list(OCCURRENCES)
    assert database.occurrences(configuration_id, there) == other
    assert [(p.environment_id, p.complete) for p in database.coverage()[configuration_id]] == [
        (here, True)
    ]
    database.add_configuration(QWEN, other)  # of every environment that has none of its own
    assert database.occurrences(configuration_id, here) == list(OCCURRENCES)
    assert [(p.signatures, p.complete) for p in database.coverage()[configuration_id]] == [
        (4, True)
    ]
