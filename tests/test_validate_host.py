"""What of an error is the host's: a profile's step times with the launches of a live run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dooly_backend.database import Database
from dooly_backend.simulation.execution import Mode
from dooly_backend.simulation.metrics import Metrics
from dooly_backend.simulation.own_cost import NoCost, StreamedCost
from dooly_backend.simulation.records import Run, ServingLimits
from dooly_backend.simulation.scheduler import simulate
from dooly_backend.simulation.step_time import StepModel
from dooly_backend.simulation.workload import load_workload
from dooly_backend.workload import Batch
from integration.validate.host import with_host_of
from tests.stream_records import RULE, fill

LIMITS = ServingLimits(
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    max_model_len=16384,
    num_gpu_blocks=20000,
    block_size=16,
    enable_prefix_caching=False,
    async_scheduling=True,
)
SLOWER = 1.8


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> StepModel:
    """A graph is launched at once, a prefill of 700 tokens in 16 ms: longer than it takes."""
    path = tmp_path_factory.mktemp("host") / "latency.db"
    with Database.open(path, create=True) as database:
        _, bundle = fill(database)
    return StepModel.of(bundle.configurations[0], RULE)


def slower(model: StepModel) -> StepModel:
    """On a host that takes longer for what it launches without a graph."""
    cost = model.cost
    assert isinstance(cost, StreamedCost)
    eager = cost.modes[Mode.EAGER]
    part = {
        name: replace(
            getattr(eager, name),
            step_us=getattr(eager, name).step_us * SLOWER,
            request_us=getattr(eager, name).request_us * SLOWER,
        )
        for name in ("host", "launch")
    }
    return model.with_cost(replace(cost, modes={**cost.modes, Mode.EAGER: replace(eager, **part)}))


def served(model: StepModel) -> Run:
    requests = load_workload("fixed:prompt=700,output=40,requests=60,rate=12").build()
    return simulate(requests, LIMITS, model)


def test_what_a_slower_host_did_is_found_again(profiled: StepModel) -> None:
    live = served(slower(profiled))
    found = with_host_of([live], profiled)
    assert found is not None
    prefill, decode = Batch.prefill(700) + Batch.decode(4, 700), Batch.decode(8, 700)
    launch = [m.time(prefill).launch_us for m in (profiled, found, slower(profiled))]
    assert launch[1] == pytest.approx(launch[2], rel=0.02)
    assert launch[1] > 1.5 * launch[0]
    assert found.time(decode) == profiled.time(decode)
    there, with_its_launches, without = (
        np.mean(Metrics(run).requests["ttft_s"]) for run in (live, served(found), served(profiled))
    )
    assert with_its_launches == pytest.approx(there, rel=0.02)
    assert without < 0.8 * there


def test_a_profile_without_launches_has_no_host(profiled: StepModel) -> None:
    assert with_host_of([served(profiled)], profiled.with_cost(NoCost())) is None


def test_a_run_without_such_steps_says_nothing(profiled: StepModel) -> None:
    requests = load_workload("fixed:prompt=1,output=40,requests=4,rate=100").build()
    assert with_host_of([simulate(requests, LIMITS, profiled)], profiled) is None
