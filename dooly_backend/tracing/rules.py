"""Dimension rules: how an operation's output dimensions come from its inputs'.

A rule is a small pure function of a `Call`; it is registered once per
operation by `@rule`. Operations without a rule preserve dimensions and are
matched by shape (`preserve`, paper section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dooly_backend.tracing.labels import LITERAL, NONE, Dim, Label, Shape, merge, split, view


@dataclass(frozen=True)
class Call:
    """An operation's arguments with every tensor replaced by its `Shape`.

    `outputs` are the sizes of the tensors it returned; `hints` the integers
    that the caller passed, in order, with their labels; `registry` knows the
    values that have exactly one origin.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int, ...], ...]
    hints: tuple[Dim, ...]
    registry: dict[int, Label]

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
                    Dim(size, hint.label if hint.size == size else NONE)
                    for hint, size in zip(window, sizes, strict=True)
                ]
        return None

    def known(self, size: int) -> Dim:
        """A dimension of `size` labelled from the caller's integers or the registry."""
        if size == 1:
            return Dim(1)
        for hint in self.hints:
            if hint.size == size and hint.label:
                return hint
        return Dim(size, self.registry.get(size, NONE))


def is_shape(value: Any) -> bool:
    """Whether `value` is the `Shape` that stands for a tensor (a scalar's is empty)."""
    return isinstance(value, TensorShape)


class TensorShape(tuple[Dim, ...]):
    """A `Shape` that stands for a tensor argument, apart from lists of integers."""

    __slots__ = ()


Rule = Callable[[Call], Sequence[Shape]]

MAPPING: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a dimension-mapping rule for operations, named without their overload."""

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
    return [_matched(call, sizes, shapes) for sizes in call.outputs]


def _matched(call: Call, sizes: tuple[int, ...], shapes: Sequence[Shape]) -> Shape:
    result = []
    for offset in range(-len(sizes), 0):
        size = sizes[offset]
        aligned = [s[offset] for s in shapes if len(s) >= -offset and s[offset].size == size]
        anywhere = [d for s in shapes for d in s if d.size == size]
        labelled = [d for d in (*aligned, *anywhere) if d.label]
        if size == 1:
            result.append(labelled[0] if aligned and labelled and aligned[0].label else Dim(1))
        else:
            result.append(labelled[0] if labelled else call.known(size))
    return tuple(result)


# -- creation ------------------------------------------------------------------------------


@rule("aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::rand", "aten::randn",
      "aten::empty_strided")
def create(call: Call) -> list[Shape]:
    """New tensors: the caller's integers, in order; unlabelled ones are literals."""
    return [_created(call, sizes) for sizes in call.outputs]


@rule("aten::new_empty", "aten::new_zeros", "aten::new_ones", "aten::new_full",
      "aten::new_empty_strided")
def create_like_with_sizes(call: Call) -> list[Shape]:
    return create(call)


def _created(call: Call, sizes: tuple[int, ...]) -> Shape:
    hinted = call.hinted(sizes)
    if hinted is None:
        return tuple(call.known(size) for size in sizes)
    return tuple(
        dim if dim.label or dim.size == 1 else _registered_or_literal(call, dim.size)
        for dim in hinted
    )


def _registered_or_literal(call: Call, size: int) -> Dim:
    return Dim(size, call.registry.get(size) or Label.of(LITERAL, size))


@rule("aten::arange")
def arange(call: Call) -> list[Shape]:
    """One dimension, as long as the range: the end's label where it starts at zero."""
    return [tuple(call.known(size) for size in sizes) for sizes in call.outputs]


# -- views ---------------------------------------------------------------------------------


@rule("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::_reshape_alias",
      "aten::flatten", "aten::unflatten", "aten::view_as")
def reshape(call: Call) -> list[Shape]:
    """Merge and split (mix(H)); the caller's labelled integers settle what H leaves open."""
    shape = call.args[0]
    (sizes,) = call.outputs
    if call.name == "aten::view" and call.shapes and _is_dtype_view(shape, sizes):
        return [preserve(call)[0]]
    result = view(shape, sizes)
    hinted = call.hinted(sizes)
    if hinted is None:
        return [result]
    return [
        tuple(
            h if h.label and (not d.label or d.label.name == "mix") else d
            for d, h in zip(result, hinted, strict=True)
        )
    ]


def _is_dtype_view(shape: Shape, sizes: Sequence[int]) -> bool:
    """A view as another dtype changes the element count."""
    count = 1
    for dim in shape:
        count *= dim.size
    for size in sizes:
        count = count // size if size else count
    return count != 1 and 0 not in sizes


@rule("aten::unsqueeze")
def unsqueeze(call: Call) -> list[Shape]:
    shape, position = call.args[0], call.argument(1, "dim")
    position %= len(shape) + 1
    return [(*shape[:position], Dim(1), *shape[position:])]


@rule("aten::squeeze")
def squeeze(call: Call) -> list[Shape]:
    shape, dim = call.args[0], call.argument(1, "dim")
    if dim is None:
        return [tuple(d for d in shape if d.size != 1)]
    dims = {int(i) % len(shape) for i in (dim if isinstance(dim, (list, tuple)) else [dim])}
    return [tuple(d for i, d in enumerate(shape) if i not in dims or d.size != 1)]


@rule("aten::permute")
def permute(call: Call) -> list[Shape]:
    shape = call.args[0]
    return [tuple(shape[i] for i in call.argument(1, "dims"))]


@rule("aten::transpose", "aten::swapaxes")
def transpose(call: Call) -> list[Shape]:
    dims = list(call.args[0])
    a, b = call.argument(1, "dim0"), call.argument(2, "dim1")
    dims[a], dims[b] = dims[b], dims[a]
    return [tuple(dims)]


@rule("aten::t", "aten::numpy_T")
def transpose_matrix(call: Call) -> list[Shape]:
    return [tuple(reversed(call.args[0]))]


@rule("aten::expand", "aten::broadcast_to")
def expand(call: Call) -> list[Shape]:
    """Sizes that change come from the caller; the others stay."""
    shape = call.args[0]
    (sizes,) = call.outputs
    hinted = call.hinted(sizes)
    padded: list[Dim | None] = [None] * (len(sizes) - len(shape)) + list(shape)
    return [
        tuple(
            old if old is not None and old.size == size
            else (hinted[i] if hinted and hinted[i].label else call.known(size))
            for i, (old, size) in enumerate(zip(padded, sizes, strict=True))
        )
    ]


# -- parts of tensors ------------------------------------------------------------------------


def _along(call: Call, position: int) -> tuple[Shape, int]:
    shape = call.args[0]
    return shape, int(call.argument(position, "dim", 0)) % max(len(shape), 1)


@rule("aten::split", "aten::split_with_sizes", "aten::chunk", "aten::tensor_split")
def split_tensor(call: Call) -> list[Shape]:
    """Parts keep the other dimensions; the cut one is labelled by the caller's sizes."""
    shape, dim = _along(call, 2)
    return [
        (*shape[:dim], _part(call, shape[dim], sizes[dim]), *shape[dim + 1 :])
        for sizes in call.outputs
    ]


def _part(call: Call, whole: Dim, size: int) -> Dim:
    """A slice of `whole`: a named size where one fits, else of the same origin."""
    if size == whole.size:
        return whole
    if size == 1:
        return Dim(1)
    for hint in call.hints:
        if hint.size == size and hint.label:
            return hint
    registered = call.registry.get(size)
    if registered is not None:
        return Dim(size, registered)
    return Dim(size, whole.label)


@rule("aten::slice", "aten::narrow")
def slice_tensor(call: Call) -> list[Shape]:
    shape, dim = _along(call, 1)
    (sizes,) = call.outputs
    return [(*shape[:dim], _part(call, shape[dim], sizes[dim]), *shape[dim + 1 :])]


@rule("aten::select")
def select(call: Call) -> list[Shape]:
    shape, dim = _along(call, 1)
    return [(*shape[:dim], *shape[dim + 1 :])]


@rule("aten::unbind")
def unbind(call: Call) -> list[Shape]:
    shape, dim = _along(call, 1)
    return [(*shape[:dim], *shape[dim + 1 :])] * len(call.outputs)


@rule("aten::cat", "aten::concat")
def cat(call: Call) -> list[Shape]:
    """The joined dimension comes from all its parts."""
    shapes = [s for s in call.args[0] if len(s)]
    dim = int(call.argument(1, "dim", 0)) % len(shapes[0])
    (sizes,) = call.outputs
    label = NONE
    for shape in shapes:
        label = label | shape[dim].label
    registered = call.registry.get(sizes[dim])
    joined = Dim(sizes[dim], registered if registered and label.name != "mix" else label)
    return [(*shapes[0][:dim], joined, *shapes[0][dim + 1 :])]


@rule("aten::stack")
def stack(call: Call) -> list[Shape]:
    shapes = call.args[0]
    dim = int(call.argument(1, "dim", 0)) % (len(shapes[0]) + 1)
    (sizes,) = call.outputs
    return [(*shapes[0][:dim], call.known(sizes[dim]), *shapes[0][dim:])]


@rule("aten::index_select")
def index_select(call: Call) -> list[Shape]:
    shape, dim = _along(call, 1)
    index = call.argument(2, "index")
    return [(*shape[:dim], *index, *shape[dim + 1 :])]


@rule("aten::index")
def index(call: Call) -> list[Shape]:
    """Advanced indexing by integer tensors: leading indices are replaced by their shape."""
    shape, indices = call.args[0], call.argument(1, "indices")
    (sizes,) = call.outputs
    given = [i for i in indices if is_shape(i)]
    if len(given) == 1 and is_shape(indices[0]) and len(sizes) == len(given[0]) + len(shape) - 1:
        candidate = (*given[0], *shape[1:])
        if tuple(d.size for d in candidate) == sizes:
            return [candidate]
    return preserve(call)


@rule("aten::embedding")
def embedding(call: Call) -> list[Shape]:
    weight, indices = call.args[0], call.args[1]
    return [(*indices, weight[-1])]


@rule("aten::gather")
def gather(call: Call) -> list[Shape]:
    return [call.argument(2, "index")]


# -- contractions ------------------------------------------------------------------------------


@rule("aten::linear")
def linear(call: Call) -> list[Shape]:
    x, weight = call.args[0], call.args[1]
    return [(*x[:-1], weight[0])]


@rule("aten::mm", "aten::matmul", "aten::bmm")
def matmul(call: Call) -> list[Shape]:
    a, b = call.args[0], call.args[1]
    return [_matmul(a, b)]


@rule("aten::addmm", "aten::baddbmm")
def add_matmul(call: Call) -> list[Shape]:
    return [_matmul(call.args[1], call.args[2])]


def _matmul(a: Shape, b: Shape) -> Shape:
    if len(b) == 1:
        return tuple(a[:-1])
    if len(a) == 1:
        return (*b[:-2], b[-1])
    batch = a[:-2] if len(a) >= len(b) else b[:-2]
    return (*batch, a[-2], b[-1])


# -- numbers of their own ------------------------------------------------------------------------


@rule("aten::argmax", "aten::argmin", "aten::max", "aten::min", "aten::sum", "aten::mean",
      "aten::amax", "aten::amin", "aten::any", "aten::all")
def reduce(call: Call) -> list[Shape]:
    """Reductions drop dimensions (or leave ones): the rest stays in order."""
    shape = call.args[0]
    return [_reduced(call, shape, sizes) for sizes in call.outputs]


def _reduced(call: Call, shape: Shape, sizes: tuple[int, ...]) -> Shape:
    dim = call.argument(1, "dim")
    if dim is None or is_shape(dim):
        return _matched(call, sizes, call.shapes)
    dims = {int(i) % len(shape) for i in (dim if isinstance(dim, (list, tuple)) else [dim])}
    if len(sizes) == len(shape):
        return tuple(Dim(1) if i in dims else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in dims)


__all__ = ["MAPPING", "Call", "Rule", "TensorShape", "is_shape", "merge", "preserve", "rule", "split"]
