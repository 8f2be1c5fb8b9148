"""What planners would have spent, of a made database whose answers were computed by hand."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_records import H200, QWEN, signature

from dooly_backend.config import Sweep
from dooly_backend.database import Database
from dooly_backend.database.records import Measurement, Occurrence, RunConditions, Signature
from dooly_backend.profiling.planners import PLANNERS, cost
from dooly_backend.workload import WorkloadPoint
from integration.corpus.corpora import CORPORA
from integration.cost.account import Account, Profile, account, sweeps_in
from integration.cost.compare import alone, sweeps
from integration.cost.report import planner_rows, read, write

SMALL, _, MOE = CORPORA
LIMITS = {"max_num_tokens": 64, "max_num_reqs": 4, "max_request_len": 20}
GRID = Sweep.model_validate(
    {
        "name": "hand",
        "tokens": [8, 16],
        "requests": [1],
        "prefill": {"chunk": [8]},
        "decode": {"batch": [1], "context": [4, 12]},
    }
)
QKV, OTHER_QKV = signature("QKVParallelLinear"), signature("QKVParallelLinear2")
ATTENTION, OTHER_ATTENTION = signature("Attention", "batch"), signature("Attention2", "batch")
NORM = signature("RMSNorm")

#: Seconds of every point, by hand: 1.5 s, 9 s, 18 s, 0.5 s, and 0.75 s in all.
TIMES: dict[Signature, dict[str, float]] = {
    QKV: {"tokens=8": 0.5, "tokens=16": 1.0},
    ATTENTION: {"batch=1x8+0": 2.0, "batch=1x1+4": 3.0, "batch=1x1+12": 4.0},
    OTHER_ATTENTION: {"batch=1x8+0": 5.0, "batch=1x1+4": 6.0, "batch=1x1+12": 7.0},
    OTHER_QKV: {"tokens=8": 0.25, "tokens=16": 0.25},
    NORM: {"tokens=8": 0.25, "tokens=16": 0.5},
}
#: Alike in every number that HF-Model-Diff compares; the first two are one HF config.
ARCHITECTURE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA = ARCHITECTURE | {"vocab_size": 128256, "max_position_embeddings": 131072}
OLDER = ARCHITECTURE | {"vocab_size": 128256, "max_position_embeddings": 8192}


def profile(
    database: Database,
    model: str,
    backend: str,
    config: dict[str, Any],
    runs: dict[Signature, list[str]],
    *others: Signature,
    setup: float = 3.0,
    started: str = "2026-01-01T00:00:01",
    limits: dict[str, int] = LIMITS,
    complete: bool = True,
    sweep: dict[str, Any] | None = None,
) -> int:
    """A configuration from which the points of `runs` were measured; it has the `others`, too."""
    environment_id = database.add_environment(H200)
    graph = [
        Occurrence(i, f"model.{of.name}", of.name, of, 1) for i, of in enumerate((*runs, *others))
    ]
    made = replace(QWEN, model=model, backend=backend, hf_config=config)
    id_ = database.add_configuration(made, graph, environment_id)
    for of, keys in runs.items():
        for key in keys:
            point = Measurement(WorkloadPoint.parse(key), (7.0,), timing_us=TIMES[of][key] * 1e6)
            database.record(of, environment_id, point, id_)
    facts = {
        "sweep": sweep or GRID.model_dump(mode="json", exclude_none=True),
        "limits": limits,
        "captured_steps": 5,
        "spent_s": {"boot": 60.0, "trace": 1.0, "resolve": 2.0, "setup": setup, "timing": 10.0},
    }
    facts |= {"complete": True} if complete else {}
    database.record_run(id_, environment_id, RunConditions(started, started, facts))
    return id_


def everything(*of: Signature) -> dict[Signature, list[str]]:
    return {one: list(TIMES[one]) for one in of}


def fill(database: Database) -> None:
    """Llama-3.1-8B with two backends, then Llama-3-8B, whose requests are shorter."""
    profile(
        database, "meta-llama/Llama-3.1-8B", "FLASH_ATTN", LLAMA, everything(QKV, NORM, ATTENTION)
    )
    profile(
        database, "meta-llama/Llama-3.1-8B", "FLASHINFER", LLAMA, everything(OTHER_ATTENTION),
        QKV, NORM, setup=2.0, started="2026-01-01T00:00:02",
    )  # fmt: skip
    profile(
        database, "meta-llama/Meta-Llama-3-8B", "FLASH_ATTN", OLDER, everything(OTHER_QKV),
        NORM, ATTENTION, setup=0.5, started="2026-01-01T00:00:03",
        limits=LIMITS | {"max_request_len": 10},
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Database.open(tmp_path / "hand.db", create=True) as database:
        fill(database)
    return tmp_path / "hand.db"


@pytest.fixture
def whole(path: Path) -> Account:
    return read(path, None, None)


def named(of: Account, name: str) -> Profile:
    return next(profile for profile in of.profiles if profile.name == name)


def test_what_every_planner_would_have_spent(whole: Account) -> None:
    """Alone they take 11.25, 20.25 and 6.25 s: the last has no room for a context of 12."""
    figures = whole.of(SMALL)
    assert (figures.signatures, figures.unique, figures.calls) == (9, 5, 9)
    spent = {name: cost(plan(figures.workloads)) for name, plan in PLANNERS.items()}
    assert {name: (c.signatures, c.points, c.seconds) for name, c in spent.items()} == {
        "Naive": (9, 7 + 7 + 6, 37.75),
        "HF-Diff": (9, 20, 37.75),  # another backend is another configuration
        "HF-Model-Diff": (6, 14, 31.5),  # takes Llama-3-8B for Llama-3.1-8B
        "Dooly": (5, 7 + 3 + 2, 11.25 + 18.0 + 0.5),
    }
    assert figures.missed("HF-Model-Diff") == 1
    assert figures.cost("Naive", "attention").seconds == 9.0 + 18.0 + 5.0
    assert figures.saved("Dooly") == pytest.approx(100 * (1 - 29.75 / 37.75))
    assert figures.saved("Dooly", "moe") is None


def test_rows_hold_setup_where_it_was_measured_and_the_papers_figures(whole: Account) -> None:
    rows = planner_rows(whole.of(SMALL), whole)
    totals = {row["planner"]: row for row in rows if row["group"] == "all"}
    setup = {name: row["setup_seconds_at_least"] for name, row in totals.items()}
    assert setup == {"Naive": 5.5, "HF-Diff": 5.5, "HF-Model-Diff": 5.0, "Dooly": 5.5}
    assert [totals[name]["paper_a100_hours"] for name in ("Naive", "Dooly")] == [26.54, 11.58]
    assert totals["Dooly"]["paper_saved"] == 56.4
    (linear,) = (r for r in rows if (r["planner"], r["group"]) == ("Dooly", "linear"))
    assert (linear["seconds"], linear["saved"], linear["setup_seconds_at_least"]) == (2.0, 42.9, "")


def test_a_wider_range_of_a_known_signature_costs_only_the_rest(tmp_path: Path) -> None:
    """The shorter one came first: Dooly spends the longest context in the second."""
    with Database.open(tmp_path / "a.db", create=True) as database:
        profile(
            database, "meta-llama/Meta-Llama-3-8B", "FLASH_ATTN", OLDER,
            {ATTENTION: ["batch=1x8+0", "batch=1x1+4"]}, limits=LIMITS | {"max_request_len": 10},
        )  # fmt: skip
        profile(
            database, "meta-llama/Llama-3.1-8B", "FLASH_ATTN", LLAMA,
            {ATTENTION: ["batch=1x1+12"]}, started="2026-01-02",
        )  # fmt: skip
    found = read(tmp_path / "a.db", None, None)
    assert [p.seconds["timing"] for p in found.profiles] == [10.0, 10.0]
    figures = found.of(SMALL)
    assert [figures.cost(name).seconds for name in ("Naive", "Dooly")] == [5.0 + 9.0, 9.0]
    assert not named(found, "Llama-3.1-8B FLASH_ATTN").is_of_known_geometry


def test_further_models_of_known_geometry(whole: Account) -> None:
    known = {p.name: (p.is_of_known_geometry, p.device_s) for p in whole.profiles}
    assert known == {  # trace, resolve, setup and timing; not the engine's start
        "Llama-3.1-8B FLASH_ATTN": (False, 16.0),
        "Llama-3.1-8B FLASHINFER": (False, 15.0),
        "Meta-Llama-3-8B FLASH_ATTN": (True, 13.5),
    }
    assert [len(p.own) for p in whole.profiles] == [7, 3, 2]


def test_nothing_is_made_up(path: Path) -> None:
    """A point without a cost, one that cannot run, and a profile that was not finished."""
    with Database.open(path) as database:
        (environment_id,) = database.environments()
        old = Measurement(WorkloadPoint.parse("tokens=8"), (7.0,))
        database.record(OTHER_QKV, environment_id, old, 3, replace=True)
        with database.writing() as connection:
            connection.execute(
                "DELETE FROM measurement WHERE (signature, point_id) IN"
                " (SELECT signature, point_id FROM measurement_cost WHERE timing_us = 4e6)"
            )
        database.skip(ATTENTION, environment_id, WorkloadPoint.parse("batch=1x1+12"), "no memory")
        profile(
            database, "Qwen/Qwen3-8B", "FLASH_ATTN", {}, everything(QKV), NORM,
            started="2026-01-03", complete=False,
        )  # fmt: skip
        found = account(database, environment_id, "hand")
    assert found.incomplete == ("Qwen/Qwen3-8B FLASH_ATTN",)
    assert [(p.untimed, p.skipped) for p in found.profiles] == [(0, 1), (0, 0), (1, 0)]
    figures = found.of(SMALL)
    assert figures.cost("Naive").seconds == 37.75 - 4.0 - 0.25
    assert "Qwen3-8B" in figures.missing
    assert figures.cost("Dooly").seconds == 29.75 - 4.0 - 0.25


def test_a_run_that_went_on_counts_with_what_it_had_spent_before(path: Path) -> None:
    with Database.open(path) as database:
        (environment_id,) = database.environments()
        profile(
            database, "meta-llama/Llama-3.1-8B", "FLASH_ATTN", LLAMA, {}, QKV, NORM, ATTENTION,
            setup=0.25, started="2026-01-05", complete=False,
        )  # fmt: skip
        first = account(database, environment_id, "hand").profiles[0]
    assert first.name == "Llama-3.1-8B FLASH_ATTN"
    assert first.seconds["setup"] == 3.25
    assert (first.seconds["boot"], first.captured_steps) == (120.0, 10)
    assert len(first.own) == 7


def adaptive_account(folder: Path) -> Account:
    """Two points of attention and one of the norm, as a sweep that places its points."""
    sweep = {"name": "adaptive", "target": 0.05, "tokens": 64, "requests": 4, "context": 20,
             "points": 40, "held_out": 4}  # fmt: skip
    with Database.open(folder / "adaptive.db", create=True) as database:
        profile(
            database, "meta-llama/Llama-3.1-8B", "FLASH_ATTN", LLAMA,
            {ATTENTION: ["batch=1x8+0", "batch=1x1+12"], NORM: ["tokens=8"]}, sweep=sweep,
        )  # fmt: skip
        profile(
            database, "meta-llama/Meta-Llama-3-8B", "FLASH_ATTN", OLDER, {}, ATTENTION, NORM,
            sweep=sweep, limits=LIMITS | {"max_request_len": 10}, started="2026-01-02",
        )  # fmt: skip
    return read(folder / "adaptive.db", None, None)


def test_the_adaptive_sweep_beside_the_grid(whole: Account, tmp_path: Path) -> None:
    adaptive = adaptive_account(tmp_path)
    rows = {row["group"]: row for row in sweeps(whole, adaptive)}
    assert set(rows) == {"attention", "other", "all"}  # no linear layer was measured with both
    assert rows["attention"] == {
        "group": "attention", "signatures": 1,
        "hand_points": 3, "hand_seconds": 9.0, "adaptive_points": 2, "adaptive_seconds": 6.0,
        "points_saved": 33.3, "seconds_saved": 33.3,
    }  # fmt: skip
    assert (rows["all"]["hand_seconds"], rows["all"]["adaptive_seconds"]) == (9.75, 6.25)
    # Of a placed point only what fits the engine counts for the model with shorter requests.
    figures = adaptive.of(SMALL)
    assert figures.cost("Naive").seconds == (2.0 + 4.0 + 0.25) + (2.0 + 0.25)
    assert figures.cost("Dooly").seconds == 6.25


def test_what_was_accounted_beside_what_one_alone_took(whole: Account, tmp_path: Path) -> None:
    with Database.open(tmp_path / "alone.db", create=True) as database:
        profile(
            database, "meta-llama/Llama-3.1-8B", "FLASHINFER", LLAMA,
            everything(QKV, NORM, OTHER_ATTENTION), setup=4.0,
        )  # fmt: skip
    (row,) = alone(whole, read(tmp_path / "alone.db", None, None))
    assert (row["reused_points"], row["accounted_points"], row["measured_points"]) == (4, 7, 7)
    assert (row["accounted_seconds"], row["measured_seconds"]) == (20.25, 20.25)
    assert (row["difference"], row["setup_after_others"], row["setup_alone"]) == (0.0, 2.0, 4.0)
    # What found something known is no check, and neither is another sweep.
    assert [row["configuration"] for row in alone(whole, whole)] == ["Llama-3.1-8B FLASH_ATTN"]
    assert list(alone(whole, adaptive_account(tmp_path))) == []


def test_the_files(whole: Account, tmp_path: Path) -> None:
    write(whole, adaptive_account(tmp_path), [], tmp_path / "out")
    text = " ".join((tmp_path / "out" / "cost.md").read_text().split())
    assert "**Not measured yet:**" in text
    assert "| Naive | all | 9 | 20 | 37.75 | 0.0 | 0.0 | 26.54 | 5.5 |" in text
    assert "1 configurations found their attention and experts known" in text
    assert text.count("(Meta-Llama-3-8B FLASH_ATTN; aim: 60 s)") == 1
    with (tmp_path / "out" / "planners.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["corpus"] for row in rows} == {"7B-8B", "MoE"}  # Llama-3.1-8B belongs to both
    with (tmp_path / "out" / "signatures.csv").open() as file:
        rows = {(r["configuration"], r["name"]): r for r in csv.DictReader(file)}
    norm = [rows[profile.name, "RMSNorm"] for profile in whole.profiles]
    assert [(r["measured_points"], r["reused_points"], r["seconds"]) for r in norm] == [
        ("2", "0", "0.75"), ("0", "2", "0.75"), ("0", "2", "0.75"),
    ]  # fmt: skip
    page = (tmp_path / "out" / "cost.html").read_text()
    assert "Llama-3.1-8B FLASHINFER" in page
    assert (tmp_path / "out" / "sweeps.csv").exists()
    assert not (tmp_path / "out" / "alone.csv").exists()


def test_sweeps_of_a_database(path: Path) -> None:
    with Database.open(path, read_only=True) as database:
        assert sweeps_in(database, 1) == ["hand"]
