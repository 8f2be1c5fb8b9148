"""A trace as a tree to read: modules, their operations, every dimension with its origin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from dooly_backend.operations.tree import Node, any_layer, forest
from dooly_backend.tracing.labels import Dim
from dooly_backend.tracing.trace import STEP, Operation, TensorSpec, Trace

_STYLES = {
    "model_config": "cyan",
    "num_toks": "green",
    "num_reqs": "yellow",
    "engine": "magenta",
    "literal": "blue",
    "mix": "bold green",
    "none": "dim",
}
_LETTERS = {"num_toks": "T", "num_reqs": "R", "engine": "E"}
_HEADINGS = {"model_config": "sizes of the model", "engine": "sizes of the engine's buffers (E)"}


@dataclass(frozen=True)
class Call:
    """A module call with what is in it, ready to compare with another layer's."""

    name: str  # the last part of the path, layer numbers included
    module_class: str
    items: tuple[Call | Operation, ...]

    @property
    def outline(self) -> tuple[object, ...]:
        """What two layers must share to be shown as one."""
        inside = tuple(
            item.outline if isinstance(item, Call) else operation_text(item).plain
            for item in self.items
        )
        return (self.module_class, inside)


def render(trace: Trace) -> RenderableType:
    """The tree of a trace, with layers of equal structure collapsed into one line."""
    counts = ", ".join(f"{count} {name}" for name, count in sorted(trace.labels().items()))
    tree = Tree(
        Text.assemble(
            (trace.model, "bold"),
            f": T={trace.num_tokens} tokens in R={trace.num_reqs} requests, {trace.layers} layers\n"
            f"{len(trace.operations)} operations, {sum(trace.labels().values())} sizes: {counts}\n"
            f"label accuracy {trace.check.accuracy:.2%} before repair, "
            f"{trace.check.predicted} of {trace.check.dimensions} sizes predicted "
            "in a pass held out",
        )
    )
    for base, heading in _HEADINGS.items():
        if trace.origins.get(base):
            branch = tree.add(Text(heading, style="dim"))
            for value, paths in sorted(trace.origins[base].items()):
                branch.add(Text.assemble((str(value), _STYLES[base]), f" {_shortest(paths)}"))
    preparation = sum(1 for op in trace.operations if op.path == STEP)
    tree.add(Text(f"outside modules: {preparation} operations", style="dim"))
    _add(tree, calls(trace))
    return tree


def _shortest(paths: Sequence[str]) -> str:
    """A path that tells most: of the configuration where one has the value, else the shortest.

    A number of layers that happens to be equal explains nothing.
    """
    return min(
        paths, key=lambda path: ("layers" in path[-8:], not path.startswith("config."), len(path))
    )


def calls(trace: Trace) -> tuple[Call, ...]:
    """The outermost module calls of a trace."""
    return tuple(_call(node, "") for node in forest(trace))


def _call(node: Node, prefix: str) -> Call:
    """A call with what is in it, in the order of the pass; `prefix` is its caller's path."""
    name = node.path.removeprefix(prefix).lstrip(".") or "model"
    inside: list[tuple[float, Call | Operation]] = [(op.index, op) for op in node.operations]
    inside += [(_first(child), _call(child, node.path)) for child in node.children]
    inside.sort(key=lambda pair: pair[0])
    return Call(name, node.record.module_class, tuple(item for _, item in inside))


def _first(node: Node) -> float:
    """Index of the first operation at or below a call, behind all others where it runs none."""
    return min((op.index for op in node.all_operations()), default=math.inf)


def _add(tree: Tree, items: Iterable[Call | Operation]) -> None:
    for _, run in groupby(items, key=_alike):
        group = list(run)
        first = group[0]
        if isinstance(first, Operation):
            branch = tree.add(operation_text(first, len(group)))
            continue
        branch = tree.add(Text.assemble((_names(group), "bold"), f" {first.module_class}"))
        _add(branch, first.items)


def _alike(item: Call | Operation) -> object:
    if isinstance(item, Operation):
        return operation_text(item).plain
    return (any_layer(f".{item.name}"), item.outline)


def _names(group: Sequence[object]) -> str:
    names = [item.name for item in group if isinstance(item, Call)]
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} alike)"


def operation_text(op: Operation, count: int = 1) -> Text:
    """One operation: name, inputs, outputs."""
    text = Text("  " if op.parent is not None else "")
    text.append(op.name.removesuffix(".default"))
    text.append(" ")
    text.append(_tensors(op.inputs))
    if op.outputs:
        text.append(" -> ")
        text.append(_tensors(op.outputs))
    if count > 1:
        text.append(f" x{count}")
    return text


def _tensors(tensors: Sequence[TensorSpec]) -> Text:
    return Text(", ").join(
        Text("[").append(Text(", ").join(_dim(d) for d in tensor.dims)).append("]")
        for tensor in tensors
    )


def _dim(dim: Dim) -> Text:
    name = dim.label.name
    shown = str(dim.size)
    if name in _LETTERS:
        shown = f"{dim.size}:{_LETTERS[name]}"
    elif name == "mix":
        shown = f"{dim.size}:{dim.label}"
    elif name == "none" and dim.size > 1:
        shown = f"{dim.size}:?"
    return Text(shown, style=_STYLES[name])
