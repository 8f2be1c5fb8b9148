"""Single batches: which, measured on the shared CPU engine for real, and compared."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner
from conftest import ROOT, Profiled

from dooly_backend.config import load_sweep
from dooly_backend.database import Database
from dooly_backend.database.records import StreamStep
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.profiling.stream_batches import STREAM_BATCHES
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.regression.step_operations import step_operations
from dooly_backend.workload import Batch
from integration.gpu import steps
from integration.gpu.workers import in_turn
from integration.per_batch import measure, report
from integration.per_batch.batches import BATCHES, MOST_TOKENS, Series, kind_of, place_of
from integration.per_batch.errors import compared
from integration.per_batch.inversions import Time
from integration.per_batch.live import measured


def test_batches_are_series_of_both_kinds_that_an_engine_takes() -> None:
    assert len({batch.key for batch in BATCHES}) == len(BATCHES)
    assert max(batch.num_tokens for batch in BATCHES) <= MOST_TOKENS
    # 24 GiB hold 196,608 tokens of Llama-3.1-8B: 32 layers, keys and values of 8 heads of 128.
    cached = [sum(r.query + r.context + 40 for r in batch.requests) for batch in BATCHES]
    assert max(cached) <= (24 << 30) // (32 * 2 * 8 * 128 * 2)
    lengths: dict[Series, list[int]] = {}
    for batch in BATCHES:
        if place := place_of(batch):
            lengths.setdefault(place[0], []).append(place[1])
    assert {series.kind for series in lengths} == {"prefill", "decode"}
    assert all(each == sorted(each) and len(each) >= 5 for each in lengths.values())
    for kind in ("prefill", "decode"):
        assert lengths[Series(kind, 1)][0] <= 144
        assert lengths[Series(kind, 1)][-1] >= 16_000
    assert sum(kind_of(batch) == "mixed" for batch in BATCHES) == 5


def test_no_batch_is_one_that_a_fit_or_its_judge_uses() -> None:
    others = {*STREAM_BATCHES, *steps.BATCHES}
    for name in ("gpu", "quick"):
        grid: Any = load_sweep(name)
        others |= {Batch.prefill(n) for n in grid.prefill.chunk}
        others |= {Batch.decode(n, c) for n in grid.decode.batch for c in grid.decode.context}
        # Up to 512 tokens a step is padded to a size that the sweep has, whatever its batch.
        others |= {Batch.prefill(n) for n in grid.tokens if n > 512}
    assert not {batch.key for batch in BATCHES} & {batch.key for batch in others}


def test_place_of() -> None:
    assert place_of(Batch.prefill(128, count=4)) == (Series("prefill", 4), 128)
    assert place_of(Batch.decode(8, 1000)) == (Series("decode", 8), 1000)
    assert place_of(Batch.prefill(128, 64)) is None
    assert place_of(Batch.prefill(128) + Batch.decode(1, 64)) is None


# -- live, with noise ----------------------------------------------------------------

ABOUT = {"model": "smollm-135m", "backend": "CPU_ATTN", "mode": "eager", "layers": 3}


def row(batch: str, turn: int, *us: float) -> dict[str, Any]:
    return {**ABOUT, "round": turn, "batch": batch, "step_mode": "eager", "interval_us": [*us]}


def test_noise_is_what_rounds_differ_by() -> None:
    """Rounds of one batch agree by accident: it has the noise of the others of its engine."""
    rows = [
        row("1x1+100", 0, 99, 100, 101),
        row("1x1+100", 1, 99, 100, 101),
        row("1x1+200", 0, 190, 190, 190),
        row("1x1+200", 1, 210, 210, 210),
    ]
    steady, shaky = measured(rows)
    assert (steady.rounds, steady.time.us, shaky.time.us) == (2, 100, 200)
    # Squares of 0, 0, -0.05 and 0.05 with two degrees of freedom: 0.05 at one standard deviation.
    assert steady.time.noise_us == pytest.approx(100 * 0.05 / math.sqrt(2))
    # Its own rounds tell more: 0.05 * sqrt(2) with one degree.
    assert shaky.time.noise_us == pytest.approx(200 * 0.05)


def test_a_single_round_has_the_spread_of_its_steps() -> None:
    (one,) = measured([row("1x1+100", 0, 90, 95, 100, 105, 110)])
    low, _, high = statistics.quantiles([90, 95, 100, 105, 110], n=4)
    assert one.time == Time(100, (high - low) / 1.349)


def test_files_of_step_costs_are_read() -> None:
    old = {**ABOUT, "round": 0, "batch": "1x128+0", "interval_us": 50.0, "low_us": 48.0}
    in_row, waited = measured([{**old, "high_us": 52.0, "launch_us": 9.0, "wall_us": 60.0}])
    assert (in_row.how, in_row.time.us) == ("in a row", 50.0)
    assert (waited.how, waited.time.us) == ("waited for", 60.0)
    assert in_row.time.noise_us == waited.time.noise_us == pytest.approx(4 / 1.349)


# -- on an engine --------------------------------------------------------------------

SMALL = (Batch.decode(4, 100), Batch.prefill(36), Batch.prefill(16) + Batch.decode(2, 64))


@pytest.fixture(scope="module")
def file(engine: VllmEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of small batches, of which one does not fit."""
    path = tmp_path_factory.mktemp("per-batch") / "per-batch.jsonl"
    about = measure.about_of(engine) | {"mode": "eager", "max_num_seqs": engine.max_num_reqs}
    about["max_num_batched_tokens"] = engine.max_num_tokens
    too_long = Batch.prefill(engine.max_num_tokens + 1)
    assert measure.measure(engine, path, about, 0, SMALL[:2]) == 2
    assert measure.measure(engine, path, about, 0, (*SMALL, too_long)) == 1  # the rest
    assert measure.measure(engine, path, about, 1, SMALL) == 3
    return path


def test_batches_are_measured_once_a_round(file: Path, engine: VllmEngine) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    keys = [batch.key for batch in SMALL]
    assert [(each["round"], each["batch"]) for each in rows] == [
        *((0, key) for key in keys),
        *((1, key) for key in reversed(keys)),
    ]
    for each in rows:
        batch = Batch.parse(each["batch"])
        assert len(each["interval_us"]) == (6 if batch.prefills else 20)
        assert ("waited_us" in each) == bool(batch.prefills)
        assert all(us > 0 for us in each.get("waited_us", [each["launch_us"]]))
        assert (each["model"], each["layers"]) == ("HuggingFaceTB/SmolLM-135M", engine.num_layers)


def test_live_batches_beside_their_prediction(file: Path, profiled: Profiled) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    with Database.open(profiled.path, read_only=True) as database:
        frame = compared(database, measured(rows))
        (fitted,) = fit_bundle(database).configurations
    assert len(frame) == 5  # three in a row, two of them waited for, too
    alone = [
        StreamStep(Batch.parse(key), 3, "eager", Batch.parse(key).num_tokens, (1.0,), (1.0,))
        for key in frame["batch"]
    ]
    sums = step_operations(fitted.configuration, fitted.occurrences, fitted.predictors, alone)
    cost = fitted.step_cost
    assert cost is not None
    expected = [
        each.us + cost.step_us + 3 * cost.layer_us + cost.request_us * step.batch.num_reqs
        for each, step in zip(sums, alone, strict=True)
    ]
    # On a CPU the host computes: waited for or not, a step takes the sum.
    assert frame["predicted_us"].tolist() == pytest.approx(expected)
    errors = (frame["predicted_us"] / frame["live_us"] - 1) * 100
    assert frame["error_percent"].tolist() == pytest.approx(errors.tolist())
    assert (frame["rounds"] == 2).all()
    assert (frame["noise_us"] > 0).all()


def test_the_report_of_one_configuration_has_no_winners(
    file: Path, profiled: Profiled, tmp_path: Path
) -> None:
    command = ["--db", str(profiled.path), "-o", str(tmp_path), str(file)]
    result = CliRunner().invoke(report.main, command, catch_exceptions=False)
    assert "no inversion beyond noise" in result.output
    assert len(pd.read_csv(tmp_path / "per-batch.csv")) == 5
    assert pd.read_csv(tmp_path / "winners.csv").empty
    assert pd.read_csv(tmp_path / "inversions.csv").empty


# -- tables --------------------------------------------------------------------------


def batches_of(backend: str, live: dict[int, float], predicted: dict[int, float]) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "model": "a/Some-8B", "backend": backend, "execution_mode": "full_graph",
            "quantization": "none", "kv_cache_dtype": "auto", "kind": "decode", "requests": 6,
            "length": list(live), "how": "in a row", "live_us": list(live.values()),
            "noise_us": 1.0, "predicted_us": [predicted[n] for n in live],
        }
    )  # fmt: skip


def test_tables_and_figure_of_an_inversion(tmp_path: Path) -> None:
    first = batches_of("FIRST", {100: 50, 200: 80, 400: 120}, {100: 51, 200: 79, 400: 110})
    second = batches_of("SECOND", {100: 70, 200: 80.5, 400: 90}, {100: 72, 200: 78, 400: 115})
    # Of another way to run, and of no series: neither counts.
    more = first.assign(how="waited for", live_us=1.0)
    mixed = first.assign(kind="mixed", length=float("nan"), live_us=1.0)
    frame = pd.concat([first, second, more, mixed], ignore_index=True)
    live = report.curves(frame, "live_us", "noise_us")
    predicted = report.curves(frame, "predicted_us")
    table = report.winners_table(live, predicted)
    names = "Some-8B, FIRST", "Some-8B, SECOND"
    assert table["winners"].tolist() == [names[0], "; ".join(names), names[1]]
    assert table["predicted"].tolist() == [names[0], names[1], names[0]]
    assert table["right"].tolist() == [True, True, False]
    # 80.5 / 80, 120 / 90
    assert table["lost_percent"].tolist() == pytest.approx([0.0, 0.625, 33.333], abs=0.006)
    (found,) = report.inversions_table(live, predicted).to_dict("records")
    assert (found["kind"], found["requests"], found["low"], found["high"]) == (
        "decode",
        6,
        100,
        400,
    )
    # Predicted to change places between 100 and 200, but to change back by 400.
    assert (found["before"], found["after"], found["verdict"]) == (*names, "elsewhere")
    report.draw(live, predicted, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "decode x 6: measured" in text
    assert all(name in text for name in names)


def test_a_configuration_says_what_is_unusual() -> None:
    usual = {"model": "a/Some-8B", "backend": "B", "execution_mode": "full_graph"}
    usual |= {"quantization": "none", "kv_cache_dtype": "auto"}
    assert report.label(usual) == "Some-8B, B"
    unusual = usual | {"execution_mode": "eager", "quantization": "fp8"}
    assert report.label(unusual) == "Some-8B, B, eager, fp8"


# -- processes that take turns -------------------------------------------------------

WORKER = """
import sys
from integration.gpu.workers import ready
name, turns, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
for turn in range(turns):
    ready()
    print("something to say", flush=True)
    with open(out, "a") as file:
        file.write(f"{name}{turn} ")
"""


def test_all_have_a_turn_before_any_has_its_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    out = tmp_path / "turns"
    # The second one ends after its first turn.
    commands = [
        ["made_worker", name, turns, str(out)] for name, turns in zip("abc", "313", strict=True)
    ]
    assert in_turn(commands, 60, turns=3) == [0, 0, 0]
    assert out.read_text().split() == ["a0", "b0", "c0", "a1", "c1", "a2", "c2"]


def test_what_run_hands_to_one() -> None:
    settings = {"rounds": 3, "layers": None, "chosen": ("1x1+8", "1x8+0")}
    assert measure.command("m:B:eager", Path("out"), settings) == [
        "integration.per_batch.measure", "one", "m:B:eager", "--out", "out",
        "--rounds", "3", "--batch", "1x1+8", "--batch", "1x8+0",
    ]  # fmt: skip
