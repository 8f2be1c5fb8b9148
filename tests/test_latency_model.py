from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import ATTENTION, CPU, H200, LINEAR, OCCURRENCES, QWEN, ROPE, SAMPLER, at, store

from dooly_backend.database import Database
from dooly_backend.database.records import (
    Measurement,
    Occurrence,
    StepCost,
    StepMeasurement,
)
from dooly_backend.errors import InputError
from dooly_backend.regression.latency import Latency, LatencyModel
from dooly_backend.regression.step_cost import fit_step_cost
from dooly_backend.workload import Batch
from tests.test_curves import grid

ALL_MEASURED = {
    ROPE: [at("constant", 2.0)],
    LINEAR: [at("tokens=16", 10.0), at("tokens=32", 18.0), at("tokens=64", 50.0)],
    ATTENTION: [
        at("batch=1x16+0", 4.0),
        at("batch=1x64+0", 16.0),
        at("batch=1x16+64", 8.0),
        at("batch=1x1+64", 3.0),
        at("batch=4x1+64", 9.0),
        at("batch=1x1+128", 5.0),
        at("batch=4x1+128", 17.0),
    ],
    SAMPLER: [at("requests=1", 3.0), at("requests=9", 11.0)],
}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with Database.open(tmp_path / "latency.db", create=True) as database:
        yield database


# -- the model


def test_an_occurrence_is_one_call(database: Database) -> None:
    store(database, ALL_MEASURED | {SAMPLER: [at("requests=1", 3.0, 4.0, 8.0)]})
    model = LatencyModel.load(database)
    rope, linear, _, sampler = model.occurrences
    batch = Batch.prefill(24)
    assert model.occurrence(rope, batch) == Latency(2, 2, 2, 2, 0, True, False)
    assert model.occurrence(linear, batch) == Latency(14, 14, 14, 14, 0, False, False)
    assert model.occurrence(linear, Batch.prefill(32)).measured
    assert model.occurrence(linear, Batch.prefill(65)).extrapolated
    assert model.occurrence(sampler, batch) == Latency(
        3, 5, 4, 8, pytest.approx(math.sqrt(14 / 3)), True, False
    )


def test_a_step_is_its_operations_and_its_own_cost(database: Database) -> None:
    ids = store(database, ALL_MEASURED)
    batch = Batch.parse("1x16+0,4x1+96")  # 20 tokens, 5 requests
    operations = 2.0 + 28 * 12.0 + 28 * (4.0 + 13.0) + 7.0
    assert LatencyModel.load(database).step_us(batch) == pytest.approx(operations)
    database.set_step_cost(*ids, StepCost(100.0, 10.0, 1.0))
    model = LatencyModel.load(database)
    assert model.step_cost == StepCost(100.0, 10.0, 1.0)
    assert model.operations_us(batch) == pytest.approx(operations)
    assert model.step_us(batch) == pytest.approx(operations + 100.0 + 28 * 10.0 + 5 * 1.0)


def test_a_signature_at_several_places_counts_at_each(database: Database) -> None:
    twice = [*OCCURRENCES, Occurrence(4, "draft.qkv_proj", "QKVParallelLinear", LINEAR, 2)]
    store(database, ALL_MEASURED, occurrences=twice)
    batch = Batch.prefill(16)
    assert LatencyModel.load(database).step_us(batch) == pytest.approx(2 + 30 * 10 + 28 * 4 + 3)


def test_a_model_outlives_its_database(tmp_path: Path) -> None:
    with Database.open(tmp_path / "latency.db", create=True) as database:
        store(database, ALL_MEASURED)
        model = LatencyModel.load(database)
    assert model.step_us(Batch.prefill(16)) > 0


def test_five_thousand_predictions_take_under_a_second(database: Database) -> None:
    work = grid(lambda size, context: 5 + size + size * context / 100)
    store(database, ALL_MEASURED | {ATTENTION: [at(f"batch={b}", us) for b, us in work.items()]})
    model = LatencyModel.load(database)
    batches = [Batch.prefill(17 + n % 900, n % 700) + Batch.decode(8, n + 1) for n in range(1250)]
    start = time.process_time()
    for batch in batches:
        for occurrence in model.occurrences:
            model.occurrence(occurrence, batch)
    assert time.process_time() - start < 1.0


# -- which configuration and environment


def test_names_that_select(database: Database) -> None:
    store(database, ALL_MEASURED)
    store(database, ALL_MEASURED, model="meta/Llama-3-8B")
    other = replace(QWEN, model="meta/Llama-3-8B")
    for name in ("meta/Llama-3-8B", "Llama-3-8B", other.digest[:8]):
        assert LatencyModel.load(database, name).configuration.model == "meta/Llama-3-8B"
    with pytest.raises(InputError, match=r"has no model 'Llama', only .*Qwen3-0\.6B, meta/Llama"):
        LatencyModel.load(database, "Llama")


def test_several_configurations_need_a_choice(database: Database) -> None:
    store(database, ALL_MEASURED)
    store(database, ALL_MEASURED, tensor_parallel=2)
    with pytest.raises(InputError, match=r"tensor_parallel=1 \(\w{12}\); .*tensor_parallel=2 \("):
        LatencyModel.load(database, "Qwen3-0.6B")
    model = LatencyModel.load(database, tensor_parallel=2, backend=None)
    assert model.configuration.tensor_parallel == 2
    with pytest.raises(InputError, match="no configuration with tensor_parallel=4, only"):
        LatencyModel.load(database, tensor_parallel=4)
    with pytest.raises(TypeError, match="tp"):
        LatencyModel.load(database, tp=2)


def test_several_environments_need_a_choice(database: Database) -> None:
    slow = {of: [slower(m, 10) for m in measured] for of, measured in ALL_MEASURED.items()}
    store(database, ALL_MEASURED)
    store(database, slow, environment=CPU)
    with pytest.raises(InputError, match=r"NVIDIA H200, vllm 0\.25\.1 \(\w{12}\); AMD EPYC"):
        LatencyModel.load(database)
    batch = Batch.prefill(16)
    for text in ("NVIDIA H200", "h200", H200.digest[:8]):
        fast = LatencyModel.load(database, environment=text)
        assert (fast.environment, fast.step_us(batch)) == (H200, pytest.approx(2 + 28 * 14 + 3))
    slow_model = LatencyModel.load(database, environment="epyc")
    assert slow_model.step_us(batch) == pytest.approx(10 * fast.step_us(batch))
    with pytest.raises(InputError, match="no environment 'B200', only NVIDIA H200"):
        LatencyModel.load(database, environment="B200")


def slower(measurement: Measurement, times: float) -> Measurement:
    return replace(measurement, samples_us=tuple(times * s for s in measurement.samples_us))


def test_a_device_s_whole_name_goes_before_a_part_of_it(database: Database) -> None:
    store(database, ALL_MEASURED)
    store(database, ALL_MEASURED, environment=replace(H200, device="NVIDIA H200 NVL"))
    assert LatencyModel.load(database, environment="NVIDIA H200").environment == H200


def test_the_only_complete_environment_is_the_one(database: Database) -> None:
    store(database, ALL_MEASURED)
    store(database, {LINEAR: ALL_MEASURED[LINEAR]}, environment=CPU)
    assert LatencyModel.load(database).environment == H200
    with pytest.raises(InputError, match=r"1 of 4 signatures measured on AMD EPYC.*run `dooly pro"):
        LatencyModel.load(database, environment="EPYC")


def test_what_is_missing_says_what_to_run(database: Database) -> None:
    with pytest.raises(InputError, match="holds no configuration: run `dooly profile MODEL --db"):
        LatencyModel.load(database)
    store(database, {})
    with pytest.raises(InputError, match=r"nothing of .* is measured.*profile Qwen/Qwen3-0\.6B"):
        LatencyModel.load(database)


# -- the step's own cost


def steps(cost: StepCost, shapes: list[tuple[int, int]]) -> list[StepMeasurement]:
    return [
        StepMeasurement(
            Batch.decode(requests, 64),
            layers,
            (0.5 * 500.0, 500.0 + cost.time_us(layers, requests), 9 * 500.0),
            500.0,
        )
        for layers, requests in shapes
    ]


@settings(deadline=None)
@given(st.floats(0, 1e4), st.floats(0, 1e3), st.floats(0, 100))
def test_a_step_cost_is_found_again(step: float, layer: float, request: float) -> None:
    cost = StepCost(step, layer, request)
    shapes = [(1, 1), (1, 8), (2, 1), (2, 8), (4, 32)]
    measured = [replace(s, live_us=(s.live_us[1],) * 3) for s in steps(cost, shapes)]
    found = fit_step_cost(measured)
    for layers, requests in ((28, 1), (28, 64), (0, 1)):
        assert found.time_us(layers, requests) == pytest.approx(
            cost.time_us(layers, requests), rel=1e-6, abs=1e-3
        )


def test_a_step_cost_uses_the_median_of_the_live_steps() -> None:
    measured = steps(StepCost(100.0, 20.0, 3.0), [(1, 1), (2, 1), (1, 4)])
    found = fit_step_cost(measured)
    assert (found.step_us, found.layer_us, found.request_us) == pytest.approx((100, 20, 3))


def test_a_step_cost_is_never_negative() -> None:
    shrinking = [
        StepMeasurement(Batch.decode(n, 64), layers, (600.0 - 50 * layers - n,), 500.0)
        for layers, n in ((1, 1), (2, 1), (3, 8), (1, 8))
    ]
    found = fit_step_cost(shrinking)
    assert min(found.step_us, found.layer_us, found.request_us) >= 0


def test_what_does_not_vary_is_the_step_s_own() -> None:
    found = fit_step_cost(steps(StepCost(100.0, 20.0, 3.0), [(2, 1), (2, 4), (2, 8)]))
    assert found.layer_us == 0
    assert (found.step_us, found.request_us) == pytest.approx((140.0, 3.0))


def test_two_steps_are_too_few() -> None:
    with pytest.raises(InputError, match="at least 3 live steps, not 2"):
        fit_step_cost(steps(StepCost(1.0, 1.0, 1.0), [(1, 1), (2, 1)]))
