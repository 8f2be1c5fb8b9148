"""What profiling a corpus costs under four ways of reusing measurements (paper, Table 3).

All of them plan over the same traces: a `Workload` is what one configuration
would have to measure on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dooly_backend.database.records import Signature, canonical_json, digest

#: Architecture parameters that HF-Model-Diff compares: heads, layers, widths. What selects
#: kernels beside them (a sliding window, a norm) is what it overlooks.
ARCHITECTURE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


@dataclass(frozen=True)
class Item:
    """One signature that a configuration runs, with the points of the sweep and their cost.

    Where `point` is its key, one of these points alone: two configurations may
    want other points of one signature.
    """

    signature: str
    group: str  # "attention", "linear", "moe", "other"
    points: int
    seconds: float
    point: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.signature, self.point


@dataclass(frozen=True)
class Workload:
    """One configuration: its model, its backend, and everything it runs."""

    model: str
    backend: str
    hf_config: Mapping[str, Any]
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Cost:
    """What a planner measures of a corpus."""

    signatures: int
    points: int
    seconds: float


def naive(corpus: Sequence[Workload]) -> list[list[Item]]:
    """Every configuration from scratch; a signature within one is measured once."""
    return [list(_unique(workload)) for workload in corpus]


def hf_diff(corpus: Sequence[Workload]) -> list[list[Item]]:
    """A configuration is reused when the whole HF config and the backend match."""
    return _by_configuration(corpus, lambda w: digest([w.backend, dict(w.hf_config)]))


def hf_model_diff(corpus: Sequence[Workload]) -> list[list[Item]]:
    """A configuration is reused when backend and architecture parameters match."""

    def key(workload: Workload) -> str:
        return canonical_json([workload.backend, architecture(workload.hf_config)])

    return _by_configuration(corpus, key)


def architecture(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture parameters of a config; what it leaves out is what follows from others."""
    found = {name: hf_config.get(name) for name in ARCHITECTURE_FIELDS}
    heads = found["num_attention_heads"]
    if heads:
        found["num_key_value_heads"] = found["num_key_value_heads"] or heads
        found["head_dim"] = found["head_dim"] or (found["hidden_size"] or 0) // heads
    return found


def dooly(corpus: Sequence[Workload]) -> list[list[Item]]:
    """A signature is measured once, whichever configuration runs it first."""
    known: set[tuple[str, str]] = set()
    work = []
    for workload in corpus:
        fresh = [item for item in _unique(workload) if item.key not in known]
        known |= {item.key for item in fresh}
        work.append(fresh)
    return work


PLANNERS: Mapping[str, Callable[[Sequence[Workload]], list[list[Item]]]] = {
    "Naive": naive,
    "HF-Diff": hf_diff,
    "HF-Model-Diff": hf_model_diff,
    "Dooly": dooly,
}


def cost(work: Sequence[Sequence[Item]], group: str | None = None) -> Cost:
    """The sum over the configurations of a plan, of one group or of all."""
    chosen = [[item for item in items if group in (None, item.group)] for items in work]
    signatures = sum(len({item.signature for item in items}) for items in chosen)
    items = [item for items in chosen for item in items]
    return Cost(signatures, sum(item.points for item in items), sum(item.seconds for item in items))


def group_of(signature: Signature) -> str:
    """The paper's grouping of signatures."""
    if signature.is_attention:
        return "attention"
    if signature.kind == "routing":
        return "moe"
    if any(part in signature.name for part in ("Linear", "linear", "_mm", "LogitsProcessor")):
        return "linear"
    return "other"


def _unique(workload: Workload) -> list[Item]:
    return list({item.key: item for item in workload.items}.values())


def _by_configuration(
    corpus: Sequence[Workload], key: Callable[[Workload], Hashable]
) -> list[list[Item]]:
    known: set[Hashable] = set()
    work: list[list[Item]] = []
    for workload in corpus:
        work.append([] if key(workload) in known else _unique(workload))
        known.add(key(workload))
    return work
