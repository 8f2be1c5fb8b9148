"""The time of steps, against the sums that a bundle makes of its predictions."""

from __future__ import annotations

import numpy as np
import pytest

from dooly_backend.database import Database
from dooly_backend.database.records import Occurrence, Signature, StepCost
from dooly_backend.regression.bundle import BundleConfiguration
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.simulation.execution import Execution, Mode
from dooly_backend.simulation.own_cost import Affine, HostCost, Shapes, own_cost
from dooly_backend.simulation.records import Batches
from dooly_backend.simulation.step_time import StepModel, group_of
from dooly_backend.workload import Batch
from tests.sample_records import ATTENTION, LINEAR, ROPE, SAMPLER, at, store

BATCHES = [
    Batch.parse(text)
    for text in ("1x64+0", "8x1+500", "1x32+64,3x1+900", "2x100+0,4x1+10", "16x1+50", "1x128+512")
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> BundleConfiguration:
    measured = {
        ROPE: [at("constant", 5.0)],
        LINEAR: [at("tokens=1", 10.0), at("tokens=64", 20.0), at("tokens=256", 70.0)],
        SAMPLER: [at("requests=1", 3.0), at("requests=32", 9.0)],
        ATTENTION: [
            at("batch=1x64+0", 30.0),
            at("batch=1x128+0", 80.0),
            at("batch=1x64+512", 60.0),
            at("batch=1x128+512", 150.0),
            at("batch=1x1+64", 4.0),
            at("batch=16x1+64", 9.0),
            at("batch=1x1+1024", 12.0),
            at("batch=16x1+1024", 99.0),
        ],
    }
    path = tmp_path_factory.mktemp("step") / "latency.db"
    with Database.open(path, create=True) as database:
        ids = store(database, measured)
        database.set_step_cost(*ids, StepCost(100.0, 10.0, 1.0))
        return fit_bundle(database).configurations[0]


def operations_us(model: BundleConfiguration, batch: Batch) -> float:
    return float(model.operations_us([batch])[0])


def test_a_step_is_its_operations_and_its_own_cost(model: BundleConfiguration) -> None:
    steps = StepModel.of(model)
    for batch in BATCHES:
        own = 100 + 28 * 10 + batch.num_reqs
        assert steps.time(batch).device_us == pytest.approx(operations_us(model, batch) + own)
        assert steps.time(batch).host_us == steps.time(batch).output_us == 0.0


def test_many_at_once_are_the_same_as_one_by_one(model: BundleConfiguration) -> None:
    steps = StepModel.of(model)
    times = steps.times(Batches.of(BATCHES))
    assert times.device_us.tolist() == [steps.time(batch).device_us for batch in BATCHES]
    assert times.extrapolated.tolist() == [steps.time(batch).extrapolated for batch in BATCHES]
    assert len(set(times.extrapolated.tolist())) == 2


def test_parts_add_up(model: BundleConfiguration) -> None:
    steps = StepModel.of(model)
    parts = steps.parts_us(Batches.of(BATCHES))
    assert set(parts) == {"attention", "linear", "other", "host"}
    total = np.sum(list(parts.values()), axis=0)
    assert total == pytest.approx(steps.times(Batches.of(BATCHES)).device_us)
    one = BATCHES[0]
    assert parts["linear"][0] == pytest.approx(28 * 20.0)
    assert parts["attention"][0] == pytest.approx(28 * 30.0)
    assert parts["other"][0] == pytest.approx(5.0 + 3.0)
    assert parts["host"][0] == pytest.approx(100 + 28 * 10 + one.num_reqs)


def test_the_forward_pass_alone(model: BundleConfiguration) -> None:
    steps = StepModel.of(model)
    forward = steps.forward_only()
    for batch in BATCHES:
        assert forward.time(batch).device_us == pytest.approx(operations_us(model, batch))
        assert steps.time(batch).device_us > forward.time(batch).device_us


def test_padding_reaches_what_depends_on_tokens(model: BundleConfiguration) -> None:
    padded = StepModel.of(model, Execution("FULL_AND_PIECEWISE", (16, 64), 16))
    plain = StepModel.of(model)
    batches = Batches.of([Batch.decode(9, 100)])
    before, after = plain.parts_us(batches), padded.parts_us(batches)
    at_16 = plain.parts_us(Batches.of([Batch.decode(16, 100)]))
    assert after["linear"] == pytest.approx(at_16["linear"])
    assert after["linear"] > before["linear"]
    assert after["attention"] == pytest.approx(before["attention"])
    assert after["other"] == pytest.approx(before["other"])


def test_a_device_that_outruns_the_host_waits_for_it(model: BundleConfiguration) -> None:
    cost = HostCost(
        serial=Affine(7.0),
        launch={Mode.EAGER: Affine(1e5)},
        host=Affine(50.0, 2.0),
        output=Affine(token_us=0.5),
    )
    time = StepModel.of(model, cost=cost).time(Batch.decode(4, 100))
    assert (time.launch_us, time.host_us, time.output_us) == (1e5, 58.0, 2.0)
    assert time.device_us == pytest.approx(operations_us(model, Batch.decode(4, 100)) + 7.0)
    batches = Batches.of([Batch.decode(4, 100)])
    parts = StepModel.of(model, cost=cost).parts_us(batches)
    assert sum(p[0] for p in parts.values()) == pytest.approx(1e5 + 58.0 + 2.0)


def test_graphs_are_launched_at_once() -> None:
    cost = HostCost(launch={Mode.EAGER: Affine(100.0), Mode.FULL: Affine(3.0)})
    numbers = np.array([5, 5])
    mode = np.array([Mode.EAGER, Mode.FULL], np.int8)
    own = cost.of(Shapes(numbers, numbers, numbers, mode))
    assert own.launch_us.tolist() == [100.0, 3.0]


def test_no_fitted_cost_is_none(model: BundleConfiguration) -> None:
    numbers = np.array([4])
    own = own_cost(None, 28).of(Shapes(numbers, numbers, numbers, np.zeros(1, np.int8)))
    assert own.serial_us.tolist() == [0.0]


def test_decodes_that_go_on() -> None:
    steps = Batches.decodes(np.array([10, 20]), 3)
    by_hand = Batches.of([Batch.parse(f"1x1+{20 + n},1x1+{10 + n}") for n in range(3)])
    assert sorted(steps.context) == sorted(by_hand.context)
    assert steps.starts.tolist() == by_hand.starts.tolist() == [0, 2, 4]
    assert steps.num_reqs.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "kind", "module_class", "group"),
    [
        ("QKVParallelLinear", "tokens", "QKVParallelLinear", "linear"),
        ("aten::mm", "tokens", "Router", "linear"),
        ("LogitsProcessor", "requests", "LogitsProcessor", "linear"),
        ("Attention", "batch", "Attention", "attention"),
        ("Sampler", "batch", "Sampler", "other"),
        ("FusedMoE", "routing", "FusedMoE", "moe"),
        ("RMSNorm", "tokens", "RMSNorm", "other"),
    ],
)
def test_groups(name: str, kind: str, module_class: str, group: str) -> None:
    state = '{"stateful":{"backend":"A"}}' if name == "Attention" else '{"stateful":{}}'
    occurrence = Occurrence(0, "model", module_class, Signature(name, "module", kind, state), 1)  # type: ignore[arg-type]
    assert group_of(occurrence) == group


def test_collectives_are_a_group_of_their_own() -> None:
    gather = Signature("dooly::gather", "operation", "requests", '{"collective":"gather"}')
    occurrence = Occurrence(0, "logits_processor", "LogitsProcessor", gather, 1)
    assert group_of(occurrence) == "collectives"
