"""The committed results of the coverage benchmark and of the corpus: complete, as the docs say."""

from __future__ import annotations

import csv
import json

import pytest
from conftest import ROOT

from integration.corpus.corpora import CASES as CORPUS
from integration.coverage.corpus import CASES, find

RESULTS = ROOT / "integration" / "coverage" / "results"
PAGE = " ".join((ROOT / "docs" / "operations.md").read_text().split())


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, str]]:
    with (RESULTS / "coverage.csv").open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize("column", ["dimensions", "traced_leaves"])
def test_no_configuration_is_left_out(rows: dict[str, dict[str, str]], column: str) -> None:
    """It has a row, or the page names it among those that have not run."""
    missing = [c.name for c in CASES if not rows.get(c.name, {}).get(column)]
    page = (RESULTS / "coverage.md").read_text()
    assert not missing or f"Not run yet: {', '.join(missing)}." in page
    assert {row["trace_error"] or row["runnable_error"] for row in rows.values()} == {""}


@pytest.mark.parametrize("step", ["traced", "prefill", "decode"])
def test_every_leaf_lies_under_one_entry(rows: dict[str, dict[str, str]], step: str) -> None:
    resolved = {name: row for name, row in rows.items() if row["traced_leaves"]}
    assert len(resolved) > 30
    for name, row in resolved.items():
        leaves = int(row[f"{step}_leaves"])
        assert leaves > 40, name
        assert int(row[f"{step}_once"]) == int(row[f"{step}_finer_once"]) == leaves, name


def test_the_registry_names_what_was_found_to_hold_state(rows: dict[str, dict[str, str]]) -> None:
    """But where vLLM runs transformers' code: attention is no module call there, its caller is."""
    others = [name for name, row in rows.items() if row["registry_agrees"] == "False"]
    assert others == ["small OLMo-2", "small StarCoder2"]


def test_a_name_that_is_part_of_others_is_itself() -> None:
    assert [case.name for case in find(["meta-llama/Llama-3.1-70B tp4"])] == [
        "meta-llama/Llama-3.1-70B tp4"
    ]
    assert [case.name for case in find(["qwen3-8b", "tp4"])] == [
        "meta-llama/Llama-3.1-70B tp4",
        "Qwen/Qwen3-8B",
    ]
    assert find([]) == list(CASES)


def test_every_model_of_the_corpus_ran() -> None:
    folder = ROOT / "integration" / "corpus" / "results" / "models"
    results = [json.loads((folder / case.file).read_text()) for case in CORPUS]
    assert [r["name"] for r in results if "error" in r] == []
    assert [r["name"] for r in results] == [case.name for case in CORPUS]


@pytest.mark.parametrize(
    ("corpus", "granularity", "sentence"),
    [
        ("7B-8B", "module", "| whole modules | {all} | {unique} |"),
        ("7B-8B", "operation", "| operations | {all} | {unique} |"),
        ("13B-72B", "module", "{all} signatures, {unique} unique; Dooly saves {saved}%"),
        ("MoE", "module", "{all} signatures, {unique} unique; Dooly saves {saved}%"),
    ],
)
def test_the_figures_of_the_page(corpus: str, granularity: str, sentence: str) -> None:
    with (ROOT / "integration" / "corpus" / "results" / "corpus.csv").open(newline="") as file:
        found = {
            row["planner"]: row
            for row in csv.DictReader(file)
            if (row["corpus"], row["granularity"], row["group"]) == (corpus, granularity, "all")
        }
    assert (
        sentence.format(
            all=found["Naive"]["signatures"],
            unique=found["Dooly"]["signatures"],
            saved=found["Dooly"]["saved"],
        )
        in PAGE
    )
