"""Several measurements on one start of an engine: plans, their waves, and the turns for real."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
import pytest
from conftest import ROOT

from dooly_backend.config import RunOptions
from dooly_backend.engines.serving import Server
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.simulation import live
from dooly_backend.simulation.records import Run, ServingRequest
from dooly_backend.simulation.run_file import load_run
from dooly_backend.simulation.workload import load_workload
from dooly_backend.workload import Batch
from integration.gpu import launching, tour
from integration.gpu.steps import read_rows
from integration.gpu.tour import Planned, load_plan, take

#: A worker of two stages; says when its turns began, and which others had started by then.
PROBE = """
import sys
from integration.gpu.workers import ready
def say(what):
    with open("events", "a") as file:
        file.write(what + "\\n")
name, turns = sys.argv[1], int(sys.argv[2])
say(f"started {name}")
ready()
for turn in range(turns):
    ready()
    say(f"turn {turn} of {name}")
"""


@pytest.mark.parametrize("path", sorted((ROOT / "integration/gpu/tours").glob("*.yaml")))
def test_the_plans(path: Path) -> None:
    planned = [each for wave in load_plan(path) for each in wave]
    assert planned
    for each in planned:
        assert all(load_workload(text).requests > 50 for text in each.workloads)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- - configuration: a:B\n    turns: [sleep]\n", "is no plan"),
        ("- configuration: a:B\n", "is no plan"),
        ("- - configuration: a:B\n    turns: [serve]\n", "a:B shall serve and has no workloads"),
        ("- - configuration: [\n", "is no plan"),
    ],
)
def test_what_is_no_plan(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(click.UsageError, match=reason):
        load_plan(tmp_path / "plan.yaml")


def test_an_engines_command() -> None:
    planned = Planned(
        configuration="org/M-8B:FLASH_ATTN:full_graph:fp8",
        turns=("steps", "serve", "serve"),
        workloads=("paper-small:rate=6",),
    )
    assert planned.name == "M-8B-FLASH_ATTN-full_graph-fp8"
    found = " ".join(planned.command(["--db", "x.db"]))
    assert found == (
        "integration.gpu.tour one org/M-8B:FLASH_ATTN:full_graph:fp8 --db x.db "
        "--turn steps --turn serve --turn serve --workload paper-small:rate=6"
    )
    rehearsed = planned.model_copy(update={"rehearse": 2}).command([])
    taken = tour.one.make_context("one", [*rehearsed[2:], "--db", "x.db", "--out", "o"]).params
    assert (taken["rehearse"], taken["turns"]) == (2, ("steps", "serve", "serve"))


def test_turns_of_a_wave_and_the_wave_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        Planned, "command", lambda self, options: ["probe", self.name, str(len(self.turns))]
    )
    first = [Planned(configuration=name, turns=("steps",) * n) for name, n in (("a", 2), ("b", 1))]
    second = [Planned(configuration="c")]
    ended = list(tour.codes([first, second], (), time.monotonic() + 120))
    assert [(each.name, code) for each, code in ended] == [("a", 0), ("b", 0), ("c", 0)]
    lines = (tmp_path / "events").read_text().splitlines()
    assert sorted(lines[:2]) == ["started a", "started b"]
    turns = [line for line in lines if line.startswith("turn")]
    assert turns == ["turn 0 of a", "turn 0 of b", "turn 1 of a", "turn 0 of c"]


def test_a_wave_for_which_no_time_is_left_is_told() -> None:
    planned = Planned(configuration="org/M:B")
    assert list(tour.codes([[planned]], (), time.monotonic() + 5)) == [(planned, None)]


def test_an_engine_serves_between_injected_steps(
    engine: VllmEngine, options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "fixed:prompt=24,output=5,requests=3,rate=50"
    planned = Planned(
        configuration="m:B:eager", turns=("serve", "serve"), workloads=(text,), rehearse=1
    )
    served: list[float | None] = []
    serve = live.serve

    def counted(server: Server, requests: list[ServingRequest], **options: Any) -> Run:
        served.append(requests[0].id)
        return serve(server, requests, **options)

    monkeypatch.setattr(live, "serve", counted)
    unused = tmp_path / "no.db"
    engine.step(Batch.decode(4, 50))
    for times in range(2):
        told = take("serve", times, engine, planned, options, unused, tmp_path)
        assert [run["file"] for run in told["runs"]] == [f"live-m-B-eager-{times}.json.xz"]
        engine.step(Batch.prefill(32) + Batch.decode(4, 50))
    assert take("serve", 1, engine, planned, options, unused, tmp_path)["runs"] == []
    runs = [load_run(file) for file in sorted(tmp_path.glob("live-*.json.xz"))]
    assert len(runs) == 2
    first = load_workload(text).build()[0].id
    assert [id == first for id in served] == [False, False, True, True, True]  # warm-up, rehearsal
    for run in runs:
        assert run.about["workload"] == text
        assert run.about["layers"] == engine.num_layers
        assert [len(record.token_s) for record in run.requests] == [5, 5, 5]


def test_launches_in_every_pattern(
    engine: VllmEngine, options: RunOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_FRESH", {"full": None, "eager": Batch.prefill(24)})
    monkeypatch.setattr(launching, "_DECODES", Batch.decode(2, 50))
    monkeypatch.setattr(launching, "_CYCLES", 2)
    monkeypatch.setattr(launching, "_BETWEEN", 3)
    text = "fixed:prompt=24,output=5,requests=3,rate=50"
    monkeypatch.setattr(launching, "_SERVED", {"eager": text})
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    before = os.sched_getaffinity(0)
    planned = Planned(configuration="m:B:eager", turns=("launches",))
    told = take("launches", 0, engine, planned, options, tmp_path / "no.db", tmp_path)
    assert os.sched_getaffinity(0) == before
    assert "execute_model" not in vars(runner)
    rows = read_rows([tmp_path / "launches-m-B-eager.jsonl"])
    assert told == {"launches": len(rows)}
    for row in rows:
        assert 0 < row["cpu_us"] < 4 * row["wall_us"]
        assert row["held_on"] in (None, row["processor"])
    # Two steps run ahead of each row, and one admits its decodes.
    free = [row for row in rows if row["held_on"] is None]
    tokens = [row["tokens"] for row in free if row["pattern"] == "among decodes"]
    assert [n for n in tokens if n > 2] == [26] * 4
    assert next(row["tokens"] for row in free if row["pattern"] == "served") == 24
    found = {(row["kind"], row["pattern"], row["held on"]): row for row in launching.summary(rows)}
    assert len(found) == 4 * len({row["held_on"] for row in rows})
    assert found["eager", "among decodes", "-"]["launches"] == 4
    assert found["eager", "in a row", "-"]["launches"] == launching._ROW + 2


def test_what_the_processors_did() -> None:
    before = launching.processor_times("cpu  100 0 50 800 20 5 5 20 0 0\n")
    after = launching.processor_times("cpu  130 0 60 850 20 5 5 30 0 0\n")
    assert before == {"busy": 160, "idle": 820, "stolen": 20}
    processors = os.cpu_count() or 1
    assert launching.shares(before, after) == {
        "busy": round(0.4 * processors, 2),
        "stolen": round(0.1 * processors, 2),
    }
