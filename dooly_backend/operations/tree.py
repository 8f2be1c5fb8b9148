"""The tree of a pass: module calls and the operations that run in each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dooly_backend.engines import parallel
from dooly_backend.tracing.trace import ModuleRecord, Operation, Trace

#: Operations that launch no kernel: they make views, allocate, or look.
STRUCTURAL = frozenset(
    f"aten::{name}"
    for name in (
        "alias", "as_strided", "chunk", "detach", "empty", "empty_like", "empty_strided", "expand",
        "flatten", "lift_fresh", "narrow", "new_empty", "new_empty_strided", "permute",
        "resolve_conj", "resolve_neg", "select", "slice", "split", "split_with_sizes", "squeeze",
        "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as", "_unsafe_view",
        "_reshape_alias", "broadcast_to", "movedim", "swapaxes", "is_pinned", "sym_size",
    )
)  # fmt: skip

_LAYER = re.compile(r"\.(\d+)(?=\.|$)")


def layer_of(path: str) -> int | None:
    """Index of the layer that a module path lies in, None outside the layers."""
    match = _LAYER.search(path)
    return int(match.group(1)) if match else None


def any_layer(path: str) -> str:
    """`path` with its layer number as ``*``: "model.layers.*.mlp"."""
    return _LAYER.sub(".*", path, count=1)


def is_structural(op: Operation) -> bool:
    """Whether the operation only rearranges: no kernel runs, nothing is measured."""
    base = op.name.split(".")[0]
    if base in STRUCTURAL:
        return True
    if base == "aten::to" or base == "aten::reshape" or base == "aten::contiguous":
        # These return their argument, or a view of it, unless they must copy.
        return _same_storage_kind(op)
    return False


def is_collective(op: Operation) -> bool:
    """Whether the operation communicates: costed by topology and degree, never timed here."""
    return parallel.is_collective(op.name)


def _same_storage_kind(op: Operation) -> bool:
    if not op.inputs or not op.outputs:
        return False
    source, result = op.inputs[0], op.outputs[0]
    return source.dtype == result.dtype and source.is_contiguous


@dataclass(frozen=True)
class Node:
    """One call of a module, with the calls and operations directly inside it."""

    index: int  # in Trace.modules
    record: ModuleRecord
    children: tuple[Node, ...]
    operations: tuple[Operation, ...]

    @property
    def path(self) -> str:
        return self.record.path

    @cached_property
    def kernels(self) -> tuple[Operation, ...]:
        """Leaf operations directly in this call that run a kernel of this device alone."""
        kernels = [op for op in self.operations if not is_structural(op) and not is_collective(op)]
        # A custom operation whose body runs nothing visible runs what the
        # dispatcher does not see: a Triton kernel. It is the leaf itself.
        entered = {op.parent for op in kernels}
        return tuple(op for op in kernels if op.index not in entered)

    def walk(self) -> Iterator[Node]:
        """This call and all below it, callers first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def all_operations(self) -> list[Operation]:
        """Every operation at or below this call, in the order of the pass."""
        found = [op for node in self.walk() for op in node.operations]
        return sorted(found, key=lambda op: op.index)


def forest(trace: Trace) -> tuple[Node, ...]:
    """The outermost module calls of a pass (model, logits, sampler), in order."""
    operations: dict[int, list[Operation]] = {}
    for op in trace.operations:
        if op.call is not None:
            operations.setdefault(op.call, []).append(op)
    children: dict[int | None, list[int]] = {}
    for index, record in enumerate(trace.modules):
        children.setdefault(record.caller, []).append(index)
    return tuple(_node(i, trace.modules, children, operations) for i in children.get(None, []))


def _node(
    index: int,
    modules: Sequence[ModuleRecord],
    children: Mapping[int | None, list[int]],
    operations: Mapping[int, list[Operation]],
) -> Node:
    return Node(
        index,
        modules[index],
        tuple(_node(i, modules, children, operations) for i in children.get(index, [])),
        tuple(operations.get(index, ())),
    )
