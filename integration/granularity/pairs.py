"""What is compared: modules of three models, and the operations that each of them runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dooly_backend.config import ModelDescription, RunOptions, load_model
from dooly_backend.engines import CapturedCall, Engine
from dooly_backend.operations.capture import Key
from dooly_backend.operations.cover import recorded
from dooly_backend.operations.runnable import place
from dooly_backend.operations.tree import Node, forest
from dooly_backend.profiling.measure import Subject
from dooly_backend.workload import Batch

#: Embeddings are no part of any pair, and a short vocabulary starts sooner.
_VOCABULARY = 4096


@dataclass(frozen=True)
class Pair:
    """One row of the comparison for every module in `names`, which are paths in a layer."""

    title: str
    model: str
    names: tuple[str, ...]

    @property
    def options(self) -> RunOptions:
        """The model at full width, in bfloat16, with as few layers as show every kind."""
        model = load_model(self.model)
        config = {**model.hf_config, "vocab_size": _VOCABULARY}
        return RunOptions.checked(
            model=ModelDescription(name=model.name, hf_config=config),
            dtype="bfloat16",
            threads=1,
        )


PAIRS = (
    Pair(
        "Gemma RMSNorm",
        "google/gemma-2-9b",
        ("post_attention_layernorm", "pre_feedforward_layernorm"),
    ),
    Pair("Cohere LayerNorm", "CohereLabs/aya-expanse-8b", ("input_layernorm",)),
    Pair(
        "Linear",
        "meta-llama/Llama-3.1-8B",
        ("self_attn.o_proj", "self_attn.qkv_proj", "mlp.down_proj", "mlp.gate_up_proj"),
    ),
)


@dataclass(frozen=True)
class Site:
    """A module of the last layer, its like in the layer before, and their operations."""

    path: str
    sibling: str
    module_class: str
    shape: str  # of its weight
    ordinals: tuple[int, ...]
    operations: tuple[str, ...]

    @property
    def name(self) -> str:
        """The module's class and what its layer calls it."""
        return f"{self.module_class} {self.path.rpartition('.')[2]}"

    @property
    def keys(self) -> list[Key]:
        """Both modules and all of their operations."""
        return [(path, at) for path in (self.path, self.sibling) for at in (None, *self.ordinals)]


def sites(engine: Engine, names: Iterable[str]) -> tuple[list[Site], list[Key]]:
    """Where modules called `names` run, and the keys of every leaf module of a step."""
    nodes = {n.path: n for root in forest(recorded(engine, Batch.prefill(8))) for n in root.walk()}
    found = []
    for name in names:
        (path, node), (sibling, _) = (
            next((p, n) for p, n in nodes.items() if p.endswith(f".{layer}.{name}"))
            for layer in (engine.num_layers - 1, engine.num_layers - 2)
        )
        tops = dict(sorted((at, top.name) for top, at in (place(node, op) for op in node.kernels)))
        found.append(
            Site(
                path,
                sibling,
                node.record.module_class,
                _shape(engine.module(path)),
                tuple(tops),
                tuple(tops.values()),
            )
        )
    return found, [(path, None) for path, node in nodes.items() if _is_leaf(node)]


def _shape(module: Any) -> str:
    """Outputs x inputs of a linear layer, whose weight may be packed; else the weight's shape."""
    if hasattr(module, "output_size_per_partition"):
        return f"{module.output_size_per_partition}x{module.input_size_per_partition}"
    return "x".join(map(str, module.weight.shape))


def _is_leaf(node: Node) -> bool:
    return not node.children and bool(node.kernels)


def subjects(site: Site, calls: Sequence[CapturedCall]) -> dict[int | None, Subject]:
    """What to time, by ordinal: the module under None, and each of its operations.

    As in a step: before the module and its first operation runs the leaf module
    that a step runs there, before every other operation the one before it; the
    like call of the layer below, which has other weights, keeps the code warm.
    """
    by_key = {(call.path, call.ordinal): call for call in calls}
    leaves = [call for call in calls if call.ordinal is None]
    at = next(i for i, call in enumerate(leaves) if call.path == site.path)
    before = leaves[at - 1]
    found: dict[int | None, Subject] = {}
    for ordinal in (None, *site.ordinals):
        call = by_key[site.path, ordinal]
        found[ordinal] = Subject(call, before, by_key[site.sibling, ordinal])
        if ordinal is not None:
            before = call
    return found
