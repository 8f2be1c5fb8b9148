"""Pipelines: batches under way, stages that overlap, and stages found in a profile."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dooly_backend.database import Database
from dooly_backend.database.records import KvCapacity, KvGroup, Occurrence, Signature, StepCost
from dooly_backend.errors import InputError
from dooly_backend.profiling.collectives import Collective
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.simulation.columns import Steps
from dooly_backend.simulation.records import Batches, ServingLimits, ServingRequest, StepTime
from dooly_backend.simulation.scheduler import simulate
from dooly_backend.simulation.source import from_bundle, from_database
from dooly_backend.simulation.stages import StageTimer, chosen_stages, stage_utilisation
from dooly_backend.workload import Batch
from integration.schedules.cases import pipeline_cases
from integration.schedules.equal import compare, vllm_version
from tests.sample_records import CPU, OCCURRENCES, QWEN, at, store
from tests.test_simulate_command import MEASURED

Dooly = Callable[..., subprocess.CompletedProcess[str]]

LIMITS = ServingLimits(
    8, 256, 256, 400, 16, enable_prefix_caching=False, async_scheduling=False, pipeline_parallel=2
)
RECEIVED = Collective("send_recv", 2, "bfloat16", 1024).signature
REDUCED = Collective("all_reduce", 2, "bfloat16", 1024).signature


class Stages:
    """Every stage takes so many microseconds, whatever the step, or for each of its tokens."""

    def __init__(self, *stages_us: float, by_token: bool = False) -> None:
        self._stages_us = stages_us
        self._by_token = by_token

    def time(self, batch: Batch) -> StepTime:
        times = batch.num_tokens if self._by_token else 1
        first, *later = (us * times for us in self._stages_us)
        return StepTime(first, later_us=tuple(later))


# -- schedules and clock ------------------------------------------------------------------


@pytest.mark.engine
def test_equal_to_vllm_with_several_batches_under_way(needs_engine: None) -> None:
    counts: Counter[str] = Counter()
    for name, case in pipeline_cases(60, version=vllm_version()).items():
        assert not compare(case, counts, Counter()), name
    assert counts["steps"] > 15_000
    assert counts["with_preemptions"] > 8


def test_one_request_leaves_a_bubble_in_every_stage() -> None:
    run = simulate([ServingRequest(0, 0.0, 16, 11)], LIMITS, Stages(1000.0, 3000.0))
    # Each token needs the one before: nothing overlaps.
    assert np.diff(run.requests[0].token_s) == pytest.approx(np.full(10, 0.004))
    assert stage_utilisation(Steps.of(run.steps), run.steps[-1].end_s) == [0.25, 0.75]


@pytest.mark.parametrize("stages_us", [(1000.0, 3000.0), (3000.0, 1000.0), (2000.0,) * 2])
def test_two_batches_keep_the_slowest_stage_busy(stages_us: tuple[float, ...]) -> None:
    requests = [ServingRequest(i, 0.0, 256 - 11, 11) for i in range(2)]  # a step each
    run = simulate(requests, replace(LIMITS, max_num_batched_tokens=245), Stages(*stages_us))
    sizes = [len(step.scheduled) for step in run.steps]
    assert sizes == [1] * 22
    ends = [step.end_s for step in run.steps]
    slowest = max(stages_us) / 1e6
    between = 2 * slowest if slowest * 2 > sum(stages_us) / 1e6 else sum(stages_us) / 1e6
    assert np.diff(ends[::2]) == pytest.approx(np.full(10, between))


def test_a_request_is_in_one_batch_at_a_time_unless_scheduling_is_asynchronous() -> None:
    requests = [ServingRequest(0, 0.0, 16, 11)]
    waits = simulate(requests, replace(LIMITS, async_scheduling=True), Stages(1000.0, 1000.0))
    # The next decode is sent after the first stage, two calls of the scheduler later.
    assert len(waits.steps) == 11
    assert waits.steps[1].start_s < waits.steps[0].end_s
    alone = simulate(requests, LIMITS, Stages(1000.0, 1000.0))
    assert all(a.end_s <= b.start_s for a, b in zip(alone.steps, alone.steps[1:], strict=False))


def test_more_stages_make_one_request_no_faster_and_many_quicker() -> None:
    many = [ServingRequest(i, 0.0, 64, 40) for i in range(64)]
    one = many[:1]
    limits = replace(LIMITS, max_num_batched_tokens=64)
    alone = replace(limits, pipeline_parallel=1)
    for requests, least, most in ((one, 0.99, 1.01), (many, 1.5, 2.0)):
        whole = simulate(requests, alone, Stages(4.0, by_token=True)).steps[-1].end_s
        halves = simulate(requests, limits, Stages(2.0, 2.0, by_token=True)).steps[-1].end_s
        assert least < whole / halves <= most


# -- stages of a profile ------------------------------------------------------------------


def add_stage(database: Database, stage: int, layers: tuple[int, int], count: int = 3) -> None:
    """Stage `stage` of `count`, with these layers; the later ones receive."""
    first, last = layers
    occurrences = [
        replace(each, count=last - first if each.count > 1 else 1) for each in OCCURRENCES
    ]
    measured: dict[Signature, list] = dict(MEASURED)
    if stage:
        occurrences.append(Occurrence(4, "", "dooly::send_recv", RECEIVED, 1))
        measured[RECEIVED] = [at("tokens=1", 50.0), at("tokens=2048", 90.0)]
    ids = store(
        database,
        measured,
        environment=CPU,
        occurrences=occurrences,
        hf_config={**QWEN.hf_config, "dooly_rank": {"stage": stage}},
        pipeline_parallel=count,
        facts={**QWEN.facts, "stage_layers": [first, last]},
    )
    database.set_step_cost(*ids, StepCost(100.0, 10.0, 1.0))
    groups = (KvGroup("FullAttentionSpec", last - first, 16, 1 << 16),)
    size = (last - first) << 16
    database.set_kv_capacity(*ids, KvCapacity(size, groups, 1 << 30, 8 << 30, 2048))


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "latency.db"
    with Database.open(path, create=True) as database:
        for stage, layers in enumerate([(0, 9), (9, 19), (19, 28)]):
            add_stage(database, stage, layers)
    return path


FILTERS = {"pipeline_parallel": 3}


def test_the_stages_of_a_database_make_a_timer(db: Path) -> None:
    source = from_database(str(db), "Qwen3-0.6B", None, FILTERS)
    assert [stage.configuration.stage for stage in source.stages] == [0, 1, 2]
    limits = source.limits({"kv_cache_gib": 1.0})
    assert limits.pipeline_parallel == 3
    assert limits.num_gpu_blocks == (1 << 30) // (10 << 16)  # of the longest stage
    timer = source.timer(limits)
    assert isinstance(timer, StageTimer)
    batches = Batches.of([Batch.decode(4, 500), Batch.prefill(200)])
    times = timer.times(batches)
    alone = [stage.times(batches).device_us for stage in timer.stages]
    assert times.device_us == pytest.approx(alone[0])
    assert times.later_us == pytest.approx(np.stack(alone[1:], axis=1))
    # The middle stage has a layer more and receives; the last one receives, too.
    assert (alone[1] > alone[2]).all()
    assert (alone[2] > alone[0] + 49).all()
    assert timer.time(Batch.decode(4, 500)).later_us == pytest.approx(tuple(times.later_us[0]))
    parts = timer.parts_us(batches)
    assert sum(parts.values()) == pytest.approx(sum(alone))
    assert parts["collectives"] == pytest.approx(
        2 * timer.stages[1].parts_us(batches)["collectives"]
    )


def test_a_bundle_holds_the_stages_too(db: Path, tmp_path: Path) -> None:
    with Database.open(db, read_only=True) as database:
        fit_bundle(database).save(tmp_path / "bundle.joblib")
    source = from_bundle(tmp_path / "bundle.joblib", "Qwen3-0.6B", FILTERS)
    again = from_database(str(db), "Qwen3-0.6B", None, FILTERS)
    batch = Batch.decode(4, 500)
    limits = source.limits({"num_gpu_blocks": 100})
    assert source.timer(limits).time(batch) == again.timer(limits).time(batch)


def test_a_middle_stage_may_stand_for_another(tmp_path: Path) -> None:
    path = tmp_path / "four.db"
    with Database.open(path, create=True) as database:
        for stage, layers in ((0, (0, 7)), (2, (14, 21)), (3, (21, 28))):
            add_stage(database, stage, layers, count=4)
    source = from_database(str(path), "Qwen3-0.6B", None, {"pipeline_parallel": 4})
    assert [stage.configuration.stage for stage in source.stages] == [0, 2, 2, 3]


def test_stages_that_do_not_make_the_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "four.db"
    with Database.open(path, create=True) as database:
        for stage, layers in ((0, (0, 7)), (2, (13, 21)), (3, (21, 28))):
            add_stage(database, stage, layers, count=4)
    with pytest.raises(InputError, match="stages of 7, 8, 8, 7 layers do not make"):
        from_database(str(path), "Qwen3-0.6B", None, {"pipeline_parallel": 4})


def test_missing_stages_are_named(tmp_path: Path) -> None:
    path = tmp_path / "part.db"
    with Database.open(path, create=True) as database:
        add_stage(database, 1, (9, 19))
    with pytest.raises(InputError, match=r"lacks stage 0, 2 of the 3 .*--pp 3 --rank 0`.*--rank 2"):
        from_database(str(path), "Qwen3-0.6B", None, FILTERS)
    with pytest.raises(InputError, match=r"stage 1 of 3 here: .* --pp 3"):
        from_database(str(path), "Qwen3-0.6B", None, {})
    assert chosen_stages([], 2) == [None, None]
    assert chosen_stages([0, 3], 4) == [0, None, None, 3]


def test_communication_that_was_not_measured_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "two.db"
    with Database.open(path, create=True) as database:
        for tensor in (1, 2):
            store(database, MEASURED, environment=CPU, tensor_parallel=tensor)
        reduced = [*OCCURRENCES, Occurrence(4, "model.layers.*", "", REDUCED, 56)]
        measured = {**MEASURED, REDUCED: [at("tokens=1", 9.0), at("tokens=2048", 90.0)]}
        store(
            database, measured, environment=CPU, occurrences=reduced, tensor_parallel=2,
            execution_mode="full_graph",
        )  # fmt: skip

    def left_out(**filters: object) -> list[str]:
        return from_database(str(path), "Qwen3-0.6B", None, filters).left_out

    assert left_out(tensor_parallel=1) == []
    assert not caplog.records
    assert left_out(tensor_parallel=2, execution_mode="eager") == ["the collectives of 2 ranks"]
    assert caplog.messages == ["not measured, and in no step time: the collectives of 2 ranks"]
    assert left_out(tensor_parallel=2, execution_mode="full_graph") == []


@pytest.mark.usefixtures("db")
def test_the_command_simulates_a_pipeline(dooly: Dooly) -> None:
    arguments = ["simulate", "Qwen3-0.6B", "--pp", "3", "--workload", "fixed:requests=20,rate=9"]
    done = dooly(*arguments, "--json", "-o", "out")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["pipeline_parallel"] == 3
    assert found["left_out"] == []
    assert all(0 < share < 1 for share in found["stage_utilisation"])
    assert len(found["stage_utilisation"]) == 3
    refused = dooly("simulate", "Qwen3-0.6B", "--pp", "3", "--calibrate", "out/none.json.xz")
    assert refused.returncode == 2
