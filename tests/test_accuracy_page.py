"""docs/accuracy.md is what its results say, and marks what misses its target."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from integration.accuracy import calls, gpu, page, per_batch, requests
from integration.accuracy.tables import MISSES, Target, at_most, paragraph, table
from integration.gpu.export_errors import PRICES


def test_the_committed_page_is_what_the_command_writes() -> None:
    assert page.PAGE.read_text() == page.page(page.ROOT), (
        "results have changed: run python -m integration.accuracy.page"
    )


def test_targets() -> None:
    assert at_most(3).mark(3.0, 2.9) == ""
    assert at_most(3).mark(2.0, 3.1) == MISSES
    assert at_most(3).mark(float("nan")) == MISSES
    between = Target("85 to 95%", most=95, least=85)
    assert [between.mark(figure) for figure in (84.9, 85, 95, 95.1)] == [MISSES, "", "", MISSES]


def test_tables_put_numbers_to_the_right_and_code_on_one_line() -> None:
    lines = table(["what", "number", ""], [["a", "1.5 %", ""], ["b", "-2 %", MISSES]])
    assert lines[1] == "| --- | ---: | --- |"
    long = paragraph("word " * 22, "`python -m some.module`", "more")
    assert "`python -m some.module`" in long
    assert max(map(len, long.splitlines())) <= 120


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree of results with one run of each, as their commands write them."""
    additivity = tmp_path / "integration/additivity/results/h200"
    additivity.mkdir(parents=True)
    pd.DataFrame(
        {
            "phase": ["prefill", "prefill", "decode"],
            "forward_error": [1.0, -2.0, 2.5],
        }
    ).to_csv(additivity / "additivity-Some-8B-FLASH_ATTN.csv", index=False)
    (additivity / "cause.md").write_text("The clock\ngives way.\n")
    results = tmp_path / "integration/gpu/results/h200"
    results.mkdir(parents=True)
    batch = {
        "phase": "decode",
        "exact": False,
        "inside": {"count": 10, "us": 100.0},
        "once": {"count": 9, "us": 99.0},
        "gap_names": [{"where": "sampler", "name": "kernel", "count": 1, "us": 1.0}],
        "doubles": {"count": 0, "us": 0.0},
        "outside": {"before the model": {"count": 4, "us": 8.0}},
        "ranges_change": {"kernel": -1},
    }
    about = {"model": "a/Some-8B", "backend": "FLASH_ATTN", "mode": "eager"}
    row = {**about, "device": "NVIDIA H200", "unit": "kernels", "batches": [batch]}
    (results / "coverage.json").write_text(json.dumps([row]))
    (results / "coverage.cause.md").write_text("A kernel of its own.\n")
    pd.DataFrame(
        {
            "model": "a/Some-8B",
            "backend": "FLASH_ATTN",
            "execution_mode": ["full_graph", "full_graph", "eager"],
            "quantization": "none",
            "layers": 32,
            "kind": "decode",
            "error_percent": [3.0, -4.0, 4.5],
            "forward_only_error_percent": [8.0, 9.0, 10.0],
        }
    ).to_csv(results / "step-errors.csv", index=False)
    return tmp_path


def rows(lines: list[str]) -> list[list[str]]:
    """Cells below the head of the table."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    return cells[2:]


def test_misses_are_marked_and_causes_shown(root: Path) -> None:
    lines = calls.additivity(root)
    assert [(row[1], row[3], row[-1]) for row in rows(lines)] == [
        ("prefill", "1.5 / 2.0 %", ""),
        ("decode", "2.5 / 2.5 %", MISSES),
    ]
    assert lines[-1] == "`integration/additivity/results/h200`: The clock gives way."


def test_coverage_says_what_lies_under_no_entry(root: Path) -> None:
    ((name, _, phase, once, gaps, doubles, outside, mark, change),) = rows(gpu.coverage(root))
    assert (name, phase) == ("Some-8B, FLASH_ATTN, eager", "decode")
    assert once == "9 of 10 kernels, 99.00 % of the time"
    assert (gaps, doubles, outside) == ("1 in sampler (1 us)", "0", "4, 8 us")
    assert (mark, change) == (MISSES, "1 differ")
    about = "integration/gpu/results/h200/coverage.json"
    assert gpu.coverage(root)[-1] == f"`{about}`: A kernel of its own."
    assert gpu.whole_steps(root)[-1].startswith("|")  # it says nothing about the other file


def test_whole_steps_by_mode_have_their_own_target(root: Path) -> None:
    found = rows(gpu.whole_steps(root))
    assert [(row[0], row[4], row[-1]) for row in found] == [
        ("Some-8B, FLASH_ATTN, full_graph", "3.5 / 4.0 %", MISSES),
        ("Some-8B, FLASH_ATTN, eager", "4.5 / 4.5 %", ""),
    ]


def test_exported_steps_stand_beside_each_other(root: Path) -> None:
    about = {"model": "a/Some-8B", "backend": "B", "execution_mode": "full_graph", "kind": "decode"}
    one = about | dict.fromkeys(PRICES, 980.0) | {"measured_us": 1000.0}
    other = one | dict.fromkeys(PRICES, 1040.0) | {"vidur_repo": None}  # beyond its tables
    frame = pd.DataFrame([one, other])
    frame.to_csv(root / "integration/gpu/results/h200/export-errors.csv", index=False)
    all_of, repository = "3.0 / 4.0 %", "2.0 / 2.0 %"
    about_it = ["Some-8B, B, full_graph", "decode", "2"]
    assert rows(gpu.exports(root)) == [[*about_it, all_of, all_of, repository, all_of, all_of]]


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A tree with single batches of one configuration, and an inversion of two that is missed."""
    results = tmp_path / "integration/per_batch/results/h200"
    results.mkdir(parents=True)
    pd.DataFrame(
        {
            "model": "a/Some-8B", "backend": "B", "execution_mode": "full_graph",
            "quantization": "none", "layers": 32,
            "batch": ["1x1+100", "1x1+200", "1x64+0", "1x64+0"],
            "kind": ["decode", "decode", "prefill", "prefill"],
            "how": ["in a row", "in a row", "in a row", "waited for"],
            "in_fit": [None, None, "attention", "attention"],
            "noise_percent": [1.0, 2.0, 0.5, 0.5],
            "error_percent": [1.0, -3.0, 9.0, -3.5],
        }
    ).to_csv(results / "per-batch.csv", index=False)  # fmt: skip
    pd.DataFrame(
        {
            "kind": "decode", "requests": 1, "length": [100, 200], "configurations": 2,
            "right": [True, False], "lost_percent": [0.0, 5.0], "worst_percent": [10.0, 30.0],
        }
    ).to_csv(results / "winners.csv", index=False)  # fmt: skip
    pd.DataFrame(
        {
            "kind": "decode", "requests": 1, "before": "A", "after": "B", "low": [100, 400],
            "high": [200, 800], "live": [150.0, 500.0], "predicted": [160.0, None],
            "verdict": ["predicted", "not predicted"],
        }
    ).to_csv(results / "inversions.csv", index=False)  # fmt: skip
    return tmp_path


def test_a_kind_of_single_batches_is_judged_by_how_it_is_served(single: Path) -> None:
    prefill, decode = rows(per_batch.single_batches(single))
    assert prefill[1:] == ["prefill", "1 (1)", "9.0 / 9.0 %", "**3.5 / 3.5 %**", "0.5 %", MISSES]
    assert decode[1:] == ["decode", "2 (0)", "**2.0 / 3.0 %**", "-", "1.5 %", ""]


def test_inversions_that_are_not_predicted_are_misses(single: Path) -> None:
    lines = per_batch.fastest(single)
    tables = [i for i, line in enumerate(lines) if line.startswith("| ---")]
    choice = rows(lines[: tables[1] - 1])
    assert choice == [["h200: decode", "2", "2", "1 (50 %)", "2.50 / 5.00 %", "20.0 / 30.0 %"]]
    found = rows(lines[tables[1] - 1 :])
    assert [row[3:] for row in found] == [
        ["100 to 200", "150", "160", "predicted", ""],
        ["400 to 800", "500", "-", "not predicted", MISSES],
    ]


def test_noise_counts_on_a_cpu_only(tmp_path: Path) -> None:
    figures = {
        "ttft_mape": 6.0, "tpot_mape": 2.0, "throughput_error": 0.5, "schedule_agreement": 99.8,
        "ttft_noise": 3.5, "tpot_noise": 1.0, "throughput_noise": 0.1,
    }  # fmt: skip
    for device in ("AMD EPYC", "NVIDIA H200"):
        folder = tmp_path / "integration/validate/results" / device.split()[0]
        folder.mkdir(parents=True)
        run = {"model": "m", "backend": "b", "device": device, "workloads": {"w": figures}}
        (folder / "figures.json").write_text(json.dumps(run))
    assert [row[-1] for row in rows(requests.served(tmp_path))] == [
        f"{MISSES}: schedule",
        f"{MISSES}: TTFT",
    ]


def test_what_was_not_measured_says_so(tmp_path: Path) -> None:
    assert gpu.coverage(tmp_path) == gpu.whole_steps(tmp_path) == ["Not measured yet."]
    assert requests.wrong_reuse(tmp_path) == ["Not measured yet."]
    assert (
        per_batch.single_batches(tmp_path) == per_batch.fastest(tmp_path) == ["Not measured yet."]
    )
