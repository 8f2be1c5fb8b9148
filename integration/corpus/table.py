"""The tables of the duplication benchmark, as Markdown and CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dooly_backend.profiling.planners import PLANNERS
from integration.corpus.corpora import CASES, CORPORA, WITH_VARIANT
from integration.corpus.plot import html
from integration.corpus.summary import (
    GROUPS,
    Figures,
    Results,
    attention,
    differing,
    figures,
    groups_of_attention,
)
from integration.coverage.runnable import PHASES, registry_agrees

NOTES = """\
What four planners would measure of the paper's corpora (section 7.2, Tables 3, 11 and 13). Every
model is traced on a CPU in bfloat16 with as few layers as show every kind, and its runnable set
resolved and signed; nothing is timed. *seconds* are an estimate: points of the sweep `quick` times
one typical cost of a point, the same for every call. They weigh points and say nothing of how much
longer a long prefill takes, so they are no GPU-hours: compare shares, not hours.

A CPU has one attention backend, so there is one configuration where the paper has three (12 against
36), and whole modules are measured (their host time is part of a step on a CPU) where the paper
measures `aten::linear` and its like; *operations* is the finer set of the same traces, which a GPU
gets. A signature is counted once for every configuration that runs it, *calls* is how often one
step of all full models runs them.
"""

PAPER_SAVED = {
    ("7B-8B", None): 56.4,
    ("13B-72B", "attention"): 66.2, ("13B-72B", "linear"): 39.1,
    ("13B-72B", "other"): 43.7, ("13B-72B", None): 62.4,
    ("MoE", "attention"): 60.8, ("MoE", "moe"): 72.8, ("MoE", "linear"): 47.3,
    ("MoE", "other"): 21.0, ("MoE", None): 61.4,
}  # fmt: skip

#: What the paper's Table 3 gives for the other planners on its 36 configurations.
PAPER_PLANNERS = {"Naive": 0.0, "HF-Diff": 7.9, "HF-Model-Diff": 39.8, "Dooly": 56.4}

COLUMNS = (
    "corpus", "granularity", "planner", "group", "configurations", "signatures", "points",
    "seconds", "saved", "paper_saved",
)  # fmt: skip

#: Pairs whose attention the issue names: (model, sliding) each.
PAIRS: tuple[tuple[tuple[str, bool | None], tuple[str, bool | None]], ...] = (
    (("Qwen3-8B", None), ("Meta-Llama-3-8B", None)),
    (("Llama-3.3-70B-Instruct tp4", None), ("Llama-2-70b-hf tp4", None)),
    (("Llama-3.3-70B-Instruct tp4", None), ("Qwen2.5-72B tp4", None)),
    (("c4ai-command-r7b-12-2024", True), ("c4ai-command-r7b-12-2024", False)),
    (("aya-expanse-8b", None), ("c4ai-command-r7b-12-2024", False)),
    (("aya-expanse-8b", None), ("Meta-Llama-3-8B", None)),
    (("aya-expanse-8b", None), ("c4ai-command-r7b-12-2024", True)),
)


def write(results: Results, out: Path) -> tuple[Path, int]:
    """corpus.md, corpus.csv, models.csv and new_work.html in `out`; the page and its charts."""
    found = [
        figures(c, results, g) for c in (*CORPORA, WITH_VARIANT) for g in ("module", "operation")
    ]
    found = [f for f in found if f.workloads]
    rows = [row for f in found for row in rows_of(f)]
    _csv(out / "corpus.csv", COLUMNS, rows)
    models = [_model(result) for result in results.values() if "error" not in result]
    if models:
        _csv(out / "models.csv", tuple(models[0]), models)
    (out / "corpus.md").write_text(markdown(found, results, models))
    page = out / "new_work.html"
    charts = [f for f in found if f.granularity == "module"]
    page.write_text(html(charts), encoding="utf-8")
    return page, len(charts)


def _csv(path: Path, columns: tuple[str, ...], rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def rows_of(found: Figures, digits: int | None = None) -> Iterable[dict[str, Any]]:
    """A row for every planner and group, seconds with so many digits behind the point."""
    for planner in PLANNERS:
        for group in (*GROUPS, None):
            cost = found.cost(planner, group)
            saved = found.saved(planner, group)
            if saved is None:
                continue
            paper: Any = ""
            if planner == "Dooly":
                paper = PAPER_SAVED.get((found.corpus.name, group), "")
            elif found.corpus.name == "7B-8B" and group is None:
                paper = PAPER_PLANNERS[planner]
            yield {
                "corpus": found.corpus.name,
                "granularity": found.granularity,
                "planner": planner,
                "group": group or "all",
                "configurations": len(found.workloads),
                "signatures": cost.signatures,
                "points": cost.points,
                "seconds": round(cost.seconds, digits),
                "saved": round(saved, 1),
                "paper_saved": paper,
            }


def _model(result: Mapping[str, Any]) -> dict[str, Any]:
    """One model's line: what runs, under which entries, and whether other steps are covered."""
    entries, finer = result["entries"], result["operation_entries"]
    built, layers = result["layers"]
    line: dict[str, Any] = {
        "model": result["name"],
        "backend": result["backend"],
        "layers": f"{built} of {layers}",
        "calls": sum(count for _, _, count in result["occurrences"]),
        "signatures": len(result["signatures"]),
        "modules": entries.get("module", 0),
        "operations": entries.get("operation", 0),
        "stateful": entries["stateful"],
        "finer_modules": finer.get("module", 0),
        "finer_operations": finer.get("operation", 0),
        "finer_signatures": len(result["operation_signatures"]),
        "registry_agrees": "yes" if registry_agrees(result) else "no",
    }
    for name in PHASES:
        step = result["steps"][name]
        kernels = step["modules"]["kernels"]
        holes = sum(len(s["gaps"]) + len(s["doubles"]) for s in step.values())
        idle = len(step["modules"]["idle"])
        line[name] = f"{kernels} of {kernels}" if not holes else f"{holes} of {kernels} not once"
        line[f"{name}_idle"] = idle
    return line | {"seconds_to_plan": result["seconds"]}


def markdown(found: list[Figures], results: Results, models: list[dict[str, Any]]) -> str:
    """The page."""
    lines = ["# Duplication in the paper's corpora", "", NOTES]
    for f in found:
        lines += _corpus(f)
    lines += ["## Attention", "", *_attention(found, results), ""]
    lines += ["## Models", "", _MODELS, "", *_table(models), ""]
    lines += ["## Why entries are modules", "", *_reasons(results), ""]
    failed = [f"- {name}: {r['error']}" for name, r in results.items() if "error" in r]
    waiting = [case.name for case in CASES if case.name not in results]
    if waiting:
        failed.append(f"- not run yet: {', '.join(waiting)}")
    return "\n".join([*lines, *(["## Not traced", "", *failed, ""] if failed else [])])


_MODELS = """\
*calls* of one step of the full model; entries of the runnable set of the built layers by
granularity, on a CPU and (finer) where operations are preferred. *stateful*: those that ran only
with the engine's forward context. *registry agrees*: they are those that the engine's own registry
binds to state, mixture-of-experts layers apart, which need the context to look themselves up.
*prefill*, *decode*: kernels of a step of two prefills alone and of nine decodes alone that lie
under exactly one entry of the mixed step's set, at both granularities; *idle*: entries that such a
step does not run."""


def _corpus(found: Figures) -> list[str]:
    name = f"{found.corpus.title}, {found.granularity}s"
    lines = [f"## {name}", ""]
    lines += [
        f"{len(found.workloads)} configurations, {found.calls} calls, "
        f"{found.signatures} signatures, {found.unique} unique."
    ]
    if found.granularity == "module":
        lines += [f"The paper's: {found.corpus.paper}."]
    if missed := found.missed("HF-Model-Diff"):
        lines += [f"HF-Model-Diff never measures {missed} of them: it takes them for others."]
    if found.missing:
        lines += [f"Without {', '.join(found.missing)}."]
    rows = [
        {
            "planner": row["planner"],
            "group": row["group"],
            "signatures": row["signatures"],
            "points": row["points"],
            "seconds (estimate)": row["seconds"],
            "saved %": row["saved"],
            "paper's hours saved %": row["paper_saved"],
        }
        for row in rows_of(found)
    ]
    lines += ["", *_table(rows), ""]
    if found.granularity == "module":
        lines += ["New work of each model, in this order, under Dooly:", ""]
        lines += _table(
            [
                {
                    "model": model,
                    **{group: f"{seconds:.0f}" for group, seconds in by_group.items()},
                    "total s": f"{sum(by_group.values()):.0f}",
                }
                for model, by_group in found.new_work()
            ]
        )
        lines += [""]
    return lines


def _attention(found: list[Figures], results: Results) -> list[str]:
    lines = []
    for f in found:
        if f.granularity == "module":
            lines += [f"{f.corpus.title}:", ""]
            lines += [
                f"- `{what}`: {', '.join(names)}"
                for what, names in groups_of_attention(f.corpus, results)
            ]
            lines += [""]
    lines += ["The pairs of issue 4:", ""]
    for one, other in PAIRS:
        pair = [attention(results.get(name, {}), sliding) for name, sliding in (one, other)]
        left, right = (_label(*side) for side in (one, other))
        if None in pair:
            continue
        (first, a), (second, b) = pair  # type: ignore[misc]
        differences = "equal" if first == second else "differ: " + "; ".join(differing(a, b))
        lines.append(f"- {left} and {right}: {differences}")
    return lines


def _label(name: str, sliding: bool | None) -> str:
    return name if sliding is None else f"{name} ({'sliding' if sliding else 'full'} layers)"


def _reasons(results: Results) -> list[str]:
    rows: dict[tuple[str, str], list[str]] = {}
    for name, result in results.items():
        for kind in ("entries", "operation_entries"):
            for reason in result.get(kind, {}).get("reasons", {}):
                which = "modules" if kind == "entries" else "operations"
                rows.setdefault((which, reason), []).append(name)
    return _table(
        {"preferred": which, "entry: reason": reason, "models": len(names)}
        for (which, reason), names in sorted(
            rows.items(), key=lambda row: (row[0][0], -len(row[1]))
        )
    )


def _table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    listed = list(rows)
    if not listed:
        return []
    head = [name.replace("_", " ") for name in listed[0]]
    return [
        _line(head),
        _line(["---"] * len(head)),
        *(_line([str(value).replace("|", "\\|") for value in row.values()]) for row in listed),
    ]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"
