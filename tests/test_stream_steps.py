"""Whole steps in a row, measured into the database: on the shared CPU engine, for real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from conftest import Profiled

from dooly_backend.config import RunOptions, load_model
from dooly_backend.database import Database
from dooly_backend.database.records import Configuration, KvCapacity
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.errors import InputError
from dooly_backend.profiling.host import measure_host
from dooly_backend.profiling.stream import (
    deepest,
    engine_bytes,
    measure_stream,
    mode_of,
    place_of,
)
from dooly_backend.profiling.stream_batches import STREAM_BATCHES
from dooly_backend.profiling.stream_run import depths_of, whole_steps
from dooly_backend.workload import Batch
from integration.gpu.step_costs import Job, options_of, waves
from integration.gpu.steps import BATCHES

SMALL = (Batch.decode(4, 100), Batch.prefill(32), Batch.prefill(16) + Batch.decode(2, 64))
GIB = 1 << 30


def test_steps_in_a_row_are_measured_once(engine: VllmEngine, tmp_path: Path) -> None:
    too_long = Batch.prefill(engine.max_num_tokens + 1)
    with Database.open(tmp_path / "latency.db", create=True) as database:
        first = measure_stream(engine, database, SMALL[:2], repeats=4)
        done = measure_stream(engine, database, (*SMALL, too_long), repeats=4)
        assert (first.known, first.measured, done.known, done.measured) == (0, 2, 2, 1)
        assert list(done.reasons) == [too_long.key]
        steps = database.stream_steps(*place_of(engine, database))
    assert [step.batch for step in steps] == list(SMALL)
    for step in steps:
        assert (step.num_layers, step.mode) == (engine.num_layers, "eager")
        assert step.padded_tokens == step.batch.num_tokens
        assert len(step.interval_us) == len(step.launch_us) == 4
        # On a CPU launching is computing: no step, the last one neither, is shorter than it.
        for interval, launch in zip(step.interval_us, step.launch_us, strict=True):
            assert interval >= launch > 0


def test_graphs_are_captured_with_experts_drawn_at_random(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's warm-up finds routers that are hooked; the class is as it was afterwards."""
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    from dooly_backend.engines.vllm_moe import graphs_routed

    class Router:
        def select_experts(self) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.ones(64, 2), torch.zeros(64, 2, dtype=torch.int32)

    moe = torch.nn.Module()
    moe.router = Router()  # type: ignore[assignment]
    moe.moe_config = SimpleNamespace(  # type: ignore[assignment]
        num_local_experts=8, experts_per_token=2, ep_rank=0
    )
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.Sequential(moe)))

    def warm_up(worker: SimpleNamespace) -> int:
        _, ids = worker.model_runner.model[0].router.select_experts()
        return len(ids.unique())

    monkeypatch.setattr(Worker, "compile_or_warm_up_model", warm_up)
    assert Worker.compile_or_warm_up_model(worker) == 1
    with graphs_routed():
        assert Worker.compile_or_warm_up_model(worker) == 8
    assert Worker.compile_or_warm_up_model is warm_up


def test_a_known_call_graph_is_left_alone(
    engine: VllmEngine, profiled: Profiled, tmp_path: Path
) -> None:
    path = tmp_path / "latency.db"
    path.write_bytes(profiled.path.read_bytes())
    with Database.open(path) as database:
        before = database.occurrences(1, 1)
        assert place_of(engine, database) == (1, 1)
        measure_stream(engine, database, SMALL[:1], repeats=2)
        assert database.occurrences(1, 1) == before != []


def test_the_host_takes_longer_for_more_requests(engine: VllmEngine, tmp_path: Path) -> None:
    with Database.open(tmp_path / "latency.db", create=True) as database:
        ids = place_of(engine, database)
        assert measure_host(database, ids, max_num_seqs=64) == 4
        assert measure_host(database, ids, max_num_seqs=64) == 0
        steps = database.host_steps(*ids)
    assert [step.num_reqs for step in steps] == [1, 4, 16, 64]
    assert all(len(step.schedule_us) > 20 < len(step.output_us) for step in steps)
    # 64 requests are much more work than one: no noise of a host hides that.
    assert min(steps[-1].schedule_us) > min(steps[0].schedule_us)
    assert min(steps[-1].output_us) > min(steps[0].output_us)


class _Captured:
    """An engine's rule: graphs of up to 512 tokens, whole ones for up to 256 requests."""

    graphs: ClassVar = {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)],
    }
    max_num_reqs = 256


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (Batch.decode(9, 100), ("full", 16)),
        (Batch.prefill(300), ("piecewise", 304)),
        (Batch.prefill(30) + Batch.decode(3, 10), ("piecewise", 40)),
        (Batch.prefill(700), ("eager", 700)),
    ],
)
def test_the_mode_of_a_step(batch: Batch, expected: tuple[str, int]) -> None:
    assert mode_of(_Captured(), batch) == expected  # type: ignore[arg-type]


def test_batches_of_the_fit_span_the_modes_and_none_is_held_out() -> None:
    modes = [mode_of(_Captured(), batch)[0] for batch in STREAM_BATCHES]  # type: ignore[arg-type]
    assert all(modes.count(mode) >= 8 for mode in ("full", "piecewise", "eager"))
    assert len(set(STREAM_BATCHES)) == len(STREAM_BATCHES)
    assert not {batch.key for batch in STREAM_BATCHES} & {batch.key for batch in BATCHES}


def test_the_deepest_engine_that_fits() -> None:
    model = load_model("meta-llama/Llama-3.1-8B")
    llama = Configuration(
        model.name, model.hf_config, "vllm", "FLASH_ATTN", "bfloat16", "auto", 16, 1, 1,
        "full_graph", 32,
    )  # fmt: skip
    capacity = KvCapacity(1, (), 16 * GIB, 140 * GIB, 8192)
    assert deepest(capacity, llama) == 32
    large = replace(capacity, weight_bytes=140 * GIB)
    layers = deepest(large, llama)
    assert 0 < layers < 32
    assert engine_bytes(large, llama, layers) <= 0.95 * large.device_bytes
    assert engine_bytes(large, llama, layers + 1) > 0.95 * large.device_bytes
    with pytest.raises(InputError, match=r"no layer of .* fits into 8 GiB"):
        deepest(replace(capacity, device_bytes=8 * GIB), llama)


def test_engines_start_in_waves_that_fit() -> None:
    jobs = [Job("m:b:eager", n, share) for n, share in enumerate((0.2, 0.4, 0.4, 0.9, 0.1))]
    assert [[job.depth for job in wave] for wave in waves(jobs)] == [[0, 1], [2], [3], [4]]


def test_a_configuration_by_its_name() -> None:
    options = options_of("smollm-135m:FLASH_ATTN", layers=4)
    assert (options.execution_mode, options.compiled, options.layers) == ("full_graph", True, 4)
    eager = options_of("smollm-135m:FLASH_ATTN:eager:fp8+kv-fp8")
    assert (eager.execution_mode, eager.compiled) == ("eager", False)
    assert (eager.quantization, eager.kv_cache_dtype) == ("fp8", "fp8")


def test_the_depths_of_whole_steps(profiled: Profiled) -> None:
    with Database.open(profiled.path, read_only=True) as database:
        assert depths_of(database, (1, 1), 3, (7, 2, 7)) == [2, 7]
        shallow, deep = depths_of(database, (1, 1), 3)
        assert (shallow, deep) == (4, 30)
        assert depths_of(database, (1, 1), 30) == [30]


def test_profile_times_whole_steps_in_processes_of_their_own(
    engine: VllmEngine, profiled: Profiled, options: RunOptions, tmp_path: Path
) -> None:
    """As `dooly profile --whole-steps --step-layers 2` does once the operations are timed."""
    path = tmp_path / "latency.db"
    path.write_bytes(profiled.path.read_bytes())
    small = options.model_copy(update={"max_num_batched_tokens": 256, "max_num_seqs": 16})
    count = whole_steps(small, path, (1, 1), 3, (2,))
    with Database.open(path, read_only=True) as database:
        found = database.stream_steps(1, 1)
        assert count == len(found) == 6  # that such a small engine takes
        assert {step.num_layers for step in found} == {2}
        assert [step.num_reqs for step in database.host_steps(1, 1)] == [1, 4, 16]
        # On a CPU nothing runs beside the host: only that is told.
        assert {cost.part for cost in database.stream_cost(1, 1)} >= {"launch", "schedule"}
