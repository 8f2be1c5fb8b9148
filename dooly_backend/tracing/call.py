"""One operation as the dimension rules see it, and the registry of rules.

A rule is a small pure function of a `Call`; it is registered once per
operation by `rule`. Operations without a rule preserve dimensions and are
matched by shape (`preserve`, paper section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dooly_backend.tracing.labels import LITERAL, NONE, Dim, Label, Shape


class TensorShape(tuple[Dim, ...]):
    """A `Shape` that stands for a tensor argument, apart from lists of integers."""

    __slots__ = ()


def is_shape(value: Any) -> bool:
    """Whether `value` is the `Shape` that stands for a tensor (a scalar's is empty)."""
    return isinstance(value, TensorShape)


@dataclass(frozen=True)
class Call:
    """An operation's arguments with every tensor replaced by its `Shape`.

    `outputs` are the sizes of the tensors it returned; `hints` the integers
    that the caller passed, in order, with their labels. `requests` knows the
    values that only the request can have in this step, `registry` the sizes of
    the model's parameters and of the engine's buffers.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, ...], ...]
    hints: tuple[Dim, ...] = ()
    registry: Mapping[int, Label] = field(default_factory=dict)
    requests: Mapping[int, Label] = field(default_factory=dict)

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Argument by position or by name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    @property
    def shapes(self) -> list[Shape]:
        """Every tensor argument, lists of tensors opened."""
        found: list[Shape] = []
        for value in (*self.args, *self.kwargs.values()):
            if is_shape(value):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += [item for item in value if is_shape(item)]
        return found

    def hinted(self, sizes: Sequence[int]) -> list[Dim] | None:
        """The caller's integers that gave `sizes`, None when they do not line up.

        A -1 of the caller lines up with any size, without a label.
        """
        for start in range(len(self.hints) - len(sizes) + 1):
            window = self.hints[start : start + len(sizes)]
            if all(h.size in (s, -1) for h, s in zip(window, sizes, strict=True)):
                return [
                    self.given(size) if hint.size == size and not hint.label
                    else Dim(size, hint.label if hint.size == size else NONE)
                    for hint, size in zip(window, sizes, strict=True)
                ]  # fmt: skip
        return None

    def given(self, value: int) -> Dim:
        """An integer argument: as the caller labelled it, else the request's, else a constant.

        A number that the caller passed without a label did not come from the
        model's attributes or from a shape, which all carry theirs: it is written
        in the code. One that the caller did not pass at all was read below it
        from the sizes of the tensors.
        """
        for hint in self.hints:
            if hint.size == value and hint.label:
                return hint
        if value < 2:  # 0, 1 and -1 are positions, not sizes
            return Dim(value)
        label = self.requests.get(value)
        if label is None and all(hint.size != value for hint in self.hints):
            sizes = (dim.label for shape in self.shapes for dim in shape if dim.size == value)
            label = next((found for found in sizes if found), self.registry.get(value))
        return Dim(value, label or Label.of(LITERAL, value))

    def known(self, size: int) -> Dim:
        """A size that no argument shows: of the caller's integers, or registered."""
        if size < 2:
            return Dim(size)
        for hint in self.hints:
            if hint.size == size and hint.label:
                return hint
        label = self.requests.get(size) or self.registry.get(size)
        if label is None and any(hint.size == size for hint in self.hints):
            label = Label.of(LITERAL, size)
        return Dim(size, label or NONE)


Rule = Callable[[Call], Sequence[Shape]]

#: Rules by operation, without its overload.
MAPPING: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a dimension-mapping rule for operations, named without their overload.

    Raises ValueError when an operation has one already.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            if name in MAPPING:
                raise ValueError(f"{name} has a rule already: {MAPPING[name].__name__}")
            MAPPING[name] = function
        return function

    return register


def preserve(call: Call) -> list[Shape]:
    """Shape matching: an output dimension inherits from the input dimension it equals.

    First the same position counted from the right (broadcasting), then any
    dimension of that size, then the caller's integers and the registry.
    """
    shapes = sorted(call.shapes, key=len, reverse=True)
    return [matched(call, sizes, shapes) for sizes in call.outputs]


def matched(call: Call, sizes: tuple[int, ...], shapes: Sequence[Shape]) -> Shape:
    """`sizes` labelled from `shapes` as in `preserve`."""
    result = []
    for offset in range(-len(sizes), 0):
        size = sizes[offset]
        aligned = [s[offset] for s in shapes if len(s) >= -offset and s[offset].size == size]
        anywhere = [d for s in shapes for d in s if d.size == size]
        labelled = [d for d in (*aligned, *anywhere) if d.label]
        if size < 2:
            result.append(Dim(size))
        else:
            result.append(labelled[0] if labelled else call.known(size))
    return tuple(result)


def along(call: Call, position: int, name: str = "dim", default: int = 0) -> tuple[Shape, int]:
    """The first argument's shape, and the non-negative index of a dimension of it."""
    shape = call.args[0]
    return shape, int(call.argument(position, name, default)) % max(len(shape), 1)


def joined(dims: Sequence[Dim]) -> Label:
    """What comes from all of `dims`; sizes of 1 decide nothing."""
    label = NONE
    for dim in dims:
        if dim.size != 1:
            label = label | dim.label
    return label
