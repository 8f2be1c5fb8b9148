"""Figures of the tables, from the results of the cases."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dooly_backend.profiling.planners import PLANNERS, Cost, Item, Workload, cost, dooly
from integration.corpus.corpora import Corpus

GROUPS = ("attention", "linear", "moe", "other")
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Figures:
    """One corpus under four planners, at one granularity."""

    corpus: Corpus
    granularity: str
    workloads: tuple[Workload, ...]
    missing: tuple[str, ...]  # cases without a result
    calls: int  # in one step of each full model

    @property
    def signatures(self) -> int:
        """Signatures of the configurations, each counted by itself."""
        return sum(len({item.signature for item in w.items}) for w in self.workloads)

    @property
    def unique(self) -> int:
        return len({item.signature for w in self.workloads for item in w.items})

    def cost(self, planner: str, group: str | None = None) -> Cost:
        return cost(PLANNERS[planner](self.workloads), group)

    def saved(self, planner: str, group: str | None = None) -> float | None:
        """Percent of the naive plan's seconds, None where the corpus has nothing of the group."""
        naive = self.cost("Naive", group).seconds
        return 100 * (1 - self.cost(planner, group).seconds / naive) if naive else None

    def missed(self, planner: str) -> int:
        """Signatures that the planner never measures, as it reuses what is not the same."""
        plan = PLANNERS[planner](self.workloads)
        return self.unique - len({item.signature for items in plan for item in items})

    def new_work(self) -> list[tuple[str, dict[str, float]]]:
        """Seconds by group that each model adds when Dooly profiles them in this order."""
        return [
            (w.model, {g: sum(i.seconds for i in items if i.group == g) for g in GROUPS})
            for w, items in zip(self.workloads, dooly(self.workloads), strict=True)
        ]


def figures(corpus: Corpus, results: Results, granularity: str = "module") -> Figures:
    """The corpus as far as its cases have run."""
    name = "signatures" if granularity == "module" else "operation_signatures"
    ran = [case for case in corpus.cases if name in results.get(case.name, {})]
    return Figures(
        corpus,
        granularity,
        tuple(_workload(results[case.name], results[case.name][name]) for case in ran),
        tuple(case.name for case in corpus.cases if case not in ran),
        sum(_calls(results[case.name], granularity) for case in ran),
    )


def _calls(result: Mapping[str, Any], granularity: str) -> int:
    if granularity == "operation":
        return int(result["operation_occurrences"])
    return sum(count for _, _, count in result["occurrences"])


def _workload(result: Mapping[str, Any], signatures: Mapping[str, Any]) -> Workload:
    items = (
        Item(digest, value["group"], value["points"], value["seconds"])
        for digest, value in signatures.items()
    )
    return Workload(result["name"], result["backend"], result["hf_config"], tuple(items))


# -- attention -------------------------------------------------------------------------


def attentions(result: Mapping[str, Any]) -> dict[str, str]:
    """Hash and canonical text of every signature of a model that holds state."""
    return {
        digest: value["canonical"]
        for digest, value in result.get("signatures", {}).items()
        if value["kind"] == "batch" and "canonical" in value
    }


def attention(result: Mapping[str, Any], sliding: bool | None = None) -> tuple[str, Any] | None:
    """Hash and components of a model's attention: its only one, or the one (not) sliding."""
    for digest, text in attentions(result).items():
        value = json.loads(text)
        window = value["attributes"].get("sliding_window")
        if sliding is None or sliding is (window is not None):
            return digest, value
    return None


def differing(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """The components in which two canonical serialisations differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted({*one, *other}):
            path = f"{where}.{name}".strip(".")
            yield from differing(one.get(name), other.get(name), path)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differing(left, right, f"{where}[{index}]")
    elif one != other:
        yield f"{where} {_short(one)} / {_short(other)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def groups_of_attention(corpus: Corpus, results: Results) -> list[tuple[str, Sequence[str]]]:
    """Models by the attention they share: description and names."""
    found: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for case in corpus.cases:
        for digest, text in attentions(results.get(case.name, {})).items():
            found.setdefault(digest, []).append(case.name)
            texts[digest] = text
    return [(f"{digest[:12]} {heads(texts[digest])}", names) for digest, names in found.items()]


def heads(text: str) -> str:
    """Query heads, KV heads and head size of an attention signature, and its window."""
    value = json.loads(text)["attributes"]
    shape = "/".join(str(value.get(n)) for n in ("num_heads", "num_kv_heads", "head_size"))
    window = value.get("sliding_window")
    return shape + (f", window {window}" if window else "")
