"""The runner of a corpus: its order, what it leaves out, devices that share the work."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sample_records import H200, OCCURRENCES, QWEN

from dooly_backend.config import load_model
from dooly_backend.database import Database
from dooly_backend.database.records import RunConditions
from dooly_backend.engines.kv_cache import GIB
from dooly_backend.errors import InputError
from dooly_backend.sweeps import described, load_sweep
from integration.corpus.corpora import CASES, Case
from integration.cost import run as module
from integration.cost.jobs import Job, jobs_of, newest_first, weight_bytes
from integration.cost.reduced import reduced
from integration.cost.run import Attempts, in_waves, unfinished, work
from integration.gpu import workers

LLAMA = Job("meta-llama/Llama-3.1-8B", "FLASH_ATTN", "full_graph")
MIXTRAL = Job("mistralai/Mixtral-8x7B-v0.1", "FLASH_ATTN", "full_graph")
GPU, QUICK, ADAPTIVE = map(load_sweep, ("gpu", "quick", "adaptive"))


def case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_a_model_has_its_backends_next_to_each_other() -> None:
    jobs = jobs_of([case("Llama-3.1-8B"), case("DeepSeek-V2-Lite")], ("A", "B"), "eager")
    assert [job.name for job in jobs] == [
        "meta-llama/Llama-3.1-8B:A:eager",
        "meta-llama/Llama-3.1-8B:B:eager",
        "deepseek-ai/DeepSeek-V2-Lite:auto:eager",  # MLA has backends of its own
    ]
    (small,) = jobs_of([case("Qwen3-8B")], ("A",), "eager", Path("reduced"))
    assert small.model == "reduced/Qwen3-8B"


def test_a_rank_of_a_group_is_refused() -> None:
    with pytest.raises(InputError, match="Llama-2-70b-hf tp4: one rank"):
        jobs_of([case("Llama-3.1-8B"), case("Llama-2-70b-hf tp4")], ("A",), "eager")


def test_what_brings_most_that_is_new_comes_first() -> None:
    def result(**points: int) -> dict[str, Any]:
        return {"operation_signatures": {name: {"points": n} for name, n in points.items()}}

    names = ("Qwen3-8B", "Llama-3.1-8B", "Llama-2-7b-hf", "Meta-Llama-3-8B")
    results = dict(
        zip(names, (result(a=5, b=2), result(a=5, b=2, c=4), result(d=6, c=4)), strict=False)
    )
    ordered = newest_first([case(name) for name in names], results)
    assert [c.name for c in ordered] == [
        "Llama-3.1-8B",  # 11
        "Llama-2-7b-hf",  # 6 more
        "Qwen3-8B",  # nothing more
        "Meta-Llama-3-8B",  # nobody knows
    ]


def test_engines_that_fit_start_together() -> None:
    jobs = [LLAMA] * 5 + [MIXTRAL] * 4
    jobs = [Job(job.model, f"B{i}", job.mode) for i, job in enumerate(jobs)]
    memory = 139 * GIB
    found = in_waves(jobs, 4, memory, ["0"])
    assert [job for wave in found for job in wave] == jobs
    assert [len(wave) for wave in found] == [4, 3, 2]
    assert [len(wave) for wave in in_waves(jobs, 4, memory, [])] == [1] * 9


def test_weights_are_estimated_from_above() -> None:
    """Llama-3.1-8B has 218 million weights a layer and 525 million in each embedding."""
    llama = load_model("meta-llama/Llama-3.1-8B").hf_config
    exact = 2 * (2 * 525_336_576 + 4 * 218_112_000)
    assert exact <= weight_bytes(llama, 4) < 1.2 * exact
    mixtral = load_model("mistralai/Mixtral-8x7B-v0.1").hf_config
    exact = 2 * (2 * 131_072_000 + 4 * 1_451_270_144)
    assert exact <= weight_bytes(mixtral, 4) < 1.2 * exact


def finished(path: Path, job: Job, sweep: str, **facts: Any) -> None:
    from dataclasses import replace

    model, backend, mode = job.name.split(":")
    with Database.open(path, create=True) as database:
        environment_id = database.add_environment(H200)
        made = replace(QWEN, model=model, backend=backend, execution_mode=mode)
        id_ = database.add_configuration(made, OCCURRENCES, environment_id)
        facts = {"sweep": described(load_sweep(sweep)), **facts}
        database.record_run(id_, environment_id, RunConditions("2026-01-01", "2026-01-01", facts))


def test_what_is_complete_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    other = Job(LLAMA.model, "FLASHINFER", "full_graph")
    assert unfinished([LLAMA, other], [(GPU, path)]) == [LLAMA, other]
    assert not path.exists()
    finished(path, LLAMA, "gpu")  # begun
    assert unfinished([LLAMA, other], [(GPU, path)]) == [LLAMA, other]
    finished(path, LLAMA, "gpu", complete=True)
    assert unfinished([LLAMA, other], [(GPU, path)]) == [other]
    assert unfinished([LLAMA, other], [(QUICK, path)]) == [LLAMA, other]
    auto = Job(LLAMA.model, "auto", "full_graph")
    assert unfinished([auto, Job(LLAMA.model, "auto", "eager")], [(GPU, path)]) == [
        Job(LLAMA.model, "auto", "eager")
    ]


def test_a_sweep_that_has_changed_since_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    finished(path, LLAMA, "gpu", complete=True)
    assert unfinished([LLAMA], [(GPU, path)]) == []
    wider = GPU.model_copy(update={"requests": (*GPU.requests, 512)})
    assert unfinished([LLAMA], [(wider, path)]) == [LLAMA]


def test_a_sweep_of_its_own_database_must_be_complete_there(tmp_path: Path) -> None:
    wanted = [(GPU, tmp_path / "a.db"), (ADAPTIVE, tmp_path / "b.db")]
    finished(tmp_path / "a.db", LLAMA, "gpu", complete=True)
    assert unfinished([LLAMA], wanted) == [LLAMA]
    finished(tmp_path / "b.db", LLAMA, "gpu", complete=True)
    assert unfinished([LLAMA], wanted) == [LLAMA]
    finished(tmp_path / "b.db", MIXTRAL, "adaptive", complete=True)
    assert unfinished([LLAMA, MIXTRAL], wanted) == [LLAMA, MIXTRAL]
    assert unfinished([LLAMA, MIXTRAL], wanted[:1]) == [MIXTRAL]


def test_what_failed_comes_last_and_what_was_killed_does_not(tmp_path: Path) -> None:
    jobs = [Job("a", name, "eager") for name in ("KILLED", "FAILED", "NEW")]
    attempts = Attempts(tmp_path / "attempts.jsonl")
    assert attempts.failed_last(jobs) == jobs
    attempts.add(jobs[0], -9, "0", 12.0)
    attempts.add(jobs[1], 1, "1", 3.0)
    assert [job.backend for job in attempts.failed_last(jobs)] == ["KILLED", "NEW", "FAILED"]
    rows = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert rows[1] == {
        "configuration": "a:FAILED:eager", "exit": 1, "device": "1", "wave_seconds": 3.0,
    }  # fmt: skip


class Devices:
    """Makes what stands for `Wave`: notes what ran where; a wave takes 20 ms."""

    def __init__(self) -> None:
        self.ran: list[tuple[str | None, list[str]]] = []
        self.events: list[str] = []
        self.lock = threading.Lock()

    def __call__(self, commands: Sequence[Sequence[str]], device: str | None) -> SimpleNamespace:
        names = [command[3] for command in commands]
        self.events.append(f"{device}: start {names[0]}")

        def run(budget_s: float, started: Callable[[], object], staged: bool) -> list[int]:
            assert budget_s > 0
            assert staged
            self.events.append(f"{device}: up {names[0]}")
            started()
            with self.lock:
                self.ran.append((device, names))
            time.sleep(0.02)
            self.events.append(f"{device}: done {names[0]}")
            return [0] * len(commands)

        return SimpleNamespace(run=run)


def test_devices_take_waves_from_one_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices()
    monkeypatch.setattr(module, "Wave", devices)
    monkeypatch.setattr(module, "_LEAST_SECONDS", 0.0)
    queue = deque([[Job("m", f"B{i}", "eager")] for i in range(6)])
    attempts = Attempts(tmp_path / "attempts.jsonl")
    end = time.monotonic() + 30
    threads = [
        threading.Thread(target=work, args=(queue, [], end, device, attempts))
        for device in ("0", "1")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for _, names in devices.ran for name in names) == [f"B{i}" for i in range(6)]
    assert {device for device, _ in devices.ran} == {"0", "1"}
    assert len((tmp_path / "attempts.jsonl").read_text().splitlines()) == 6


def test_the_next_wave_starts_while_one_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices()
    monkeypatch.setattr(module, "Wave", devices)
    queue = deque([[Job("m", name, "eager")] for name in "abc"])
    attempts = Attempts(tmp_path / "attempts.jsonl")
    work(queue, [], time.monotonic() + 120, "0", attempts)
    order = ["start a", "up a", "start b", "done a", "up b", "start c", "done b", "up c", "done c"]
    assert devices.events == [f"0: {event}" for event in order]


def test_no_wave_starts_without_time_for_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices()
    monkeypatch.setattr(module, "Wave", devices)
    queue = deque([[LLAMA]])
    work(queue, [], time.monotonic() + 59, "0", Attempts(tmp_path / "attempts.jsonl"))
    assert devices.ran == []
    assert list(queue) == [[LLAMA]]


def test_a_worker_sees_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert workers.devices() == ["2", "3"]
    assert workers.on_device("3")["CUDA_VISIBLE_DEVICES"] == "3"
    assert workers.on_device(None)["CUDA_VISIBLE_DEVICES"] == "2, 3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert workers.devices() == []


def test_small_models_share_what_large_ones_share() -> None:
    def small(name: str) -> dict[str, Any]:
        return reduced(load_model(case(name).model).hf_config)

    llama, qwen, older = (small(n) for n in ("Llama-3.1-8B", "Qwen3-8B", "Llama-2-7b-hf"))
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    assert [llama[name] for name in heads] == [qwen[name] for name in heads] == [8, 2, 128]
    assert [older[name] for name in heads] == [8, 8, 128]
    lite, moe = small("DeepSeek-V2-Lite"), small("deepseek-moe-16b-base")
    for name in ("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"):
        assert lite[name] == moe[name]
    assert lite["n_routed_experts"] == 64
    assert "head_dim" not in lite
