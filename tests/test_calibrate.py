"""The host's part of a step, found again in a run that was made with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dooly_backend.database import Database
from dooly_backend.errors import InputError
from dooly_backend.regression.bundle import BundleConfiguration
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.simulation.calibrate import calibrated
from dooly_backend.simulation.execution import Execution, Mode
from dooly_backend.simulation.own_cost import Affine, HostCost
from dooly_backend.simulation.records import Run, ServingLimits, ServingRequest
from dooly_backend.simulation.replay import batches
from dooly_backend.simulation.scheduler import simulate
from dooly_backend.simulation.step_time import StepModel
from dooly_backend.simulation.workload import Workload
from dooly_backend.workload import Batch
from tests.sample_records import store
from tests.test_simulate_command import MEASURED

LIMITS = ServingLimits(64, 256, 4096, 5000, 16)
GRAPHS = Execution("FULL_AND_PIECEWISE", (1, 2, 4, 8, 16, 32, 64, 128), 64)
TRUE = HostCost(
    serial=Affine(1500.0, 20.0),
    launch={Mode.EAGER: Affine(20_000.0), Mode.PIECEWISE: Affine(4_000.0)},
    host=Affine(400.0, 10.0),
    output=Affine(30.0, 5.0),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> BundleConfiguration:
    path = tmp_path_factory.mktemp("calibrate") / "latency.db"
    with Database.open(path, create=True) as database:
        store(database, MEASURED)
        return fit_bundle(database).configurations[0]


def served(model: BundleConfiguration, cost: HostCost, rate: float = 20.0) -> Run:
    workload = Workload(
        requests=150, prompt=200, prompt_median=120, output=40, output_median=30, rate=rate
    )
    return simulate(workload.build(), LIMITS, StepModel.of(model, GRAPHS, cost))


def test_the_cost_of_a_run_is_found_again(model: BundleConfiguration) -> None:
    found = calibrated([served(model, TRUE)], StepModel.of(model, GRAPHS))
    for part in ("host", "output", "serial"):
        expected, actual = getattr(TRUE, part), getattr(found, part)
        assert actual.step_us == pytest.approx(expected.step_us, rel=0.02), part
        assert actual.request_us == pytest.approx(expected.request_us, rel=0.02), part
    assert found.launch[Mode.EAGER].step_us == pytest.approx(20_000.0, rel=0.02)
    assert found.launch[Mode.PIECEWISE].step_us == pytest.approx(4_000.0, rel=0.02)
    assert Mode.FULL not in found.launch


@pytest.mark.parametrize("launch_us", [1_000.0, 20_000.0])
def test_a_step_ends_when_all_is_launched_and_computed(
    model: BundleConfiguration, launch_us: float
) -> None:
    """The device works while the host launches: the longer of the two counts, not their sum."""
    cost = HostCost(launch={Mode.EAGER: Affine(launch_us)}, host=Affine(400.0))
    operations = StepModel.of(model, GRAPHS).time(Batch.prefill(200)).device_us
    assert 1_000 < operations < 20_000
    run = simulate([ServingRequest(0, 0.0, 200, 1)], LIMITS, StepModel.of(model, GRAPHS, cost))
    assert run.steps[0].end_s * 1e6 == pytest.approx(400.0 + max(operations, launch_us))


def test_too_few_steps_are_refused(model: BundleConfiguration) -> None:
    run = served(model, TRUE)
    with pytest.raises(InputError, match="at least 20 live steps"):
        calibrated([Run(run.steps[:5], run.requests)], StepModel.of(model, GRAPHS))
    with pytest.raises(InputError, match="at least 20 live steps"):
        calibrated([], StepModel.of(model, GRAPHS))


def test_a_cpu_run_is_fitted_as_a_whole(model: BundleConfiguration) -> None:
    """In series everything adds up; a negative cost and a jump between small batches are found."""
    limits = replace(LIMITS, async_scheduling=False)
    jumps = {2: -80.0, 4: 400.0, 8: 90.0, 16: 110.0, 32: 180.0, 64: 250.0, 128: 500.0, 256: 900.0}
    curve = tuple((float(tokens), us) for tokens, us in jumps.items())
    cost = HostCost(serial=Affine(-200.0, 30.0, curve=curve))
    plain = StepModel.of(model)
    workload = Workload(
        requests=60, prompt=200, prompt_median=120, output=40, output_median=30, rate=60.0
    )
    run = simulate(workload.build(), limits, plain.with_cost(cost))
    found = calibrated([run], plain).serial
    assert [place for place, _ in found.curve] == [float(tokens) for tokens in jumps]
    shapes = plain.shapes(batches(run))
    assert set(shapes.tokens) > {1, 2, 3, 4, 5}
    assert found.of(shapes) == pytest.approx(cost.serial.of(shapes), abs=5.0)
