"""Arguments of an operation for any step, made from its labels and formulas (paper section 5.2).

Sizes that the model decides stay, sizes that the request decides are set, and
mixed ones are computed again from their formula, padding included. Layouts are
kept. Integers get values that are valid for what reads them; where no rule says
what is valid, there is no input, and the caller falls back to a captured one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dooly_backend.errors import TraceError
from dooly_backend.tracing.labels import Dim
from dooly_backend.tracing.trace import Affine, Operation, TensorSpec

#: Exclusive upper bound of an operation's integer arguments, from the sizes of its inputs.
Bound = Callable[[Sequence[Sequence[int]]], int]

#: Operations that read their integer tensors as places in another input.
BOUNDS: Mapping[str, Bound] = {
    "aten::embedding": lambda sizes: sizes[0][0],  # rows of the weight
    "aten::index_select": lambda sizes: min(sizes[0]),  # along any dimension
    "aten::index": lambda sizes: min(sizes[0]),
    "aten::gather": lambda sizes: min(sizes[0]),
    "aten::index_copy_": lambda sizes: min(sizes[0]),
    "_C::rotary_embedding": lambda sizes: sizes[-1][0],  # positions: rows of the cosines
}

#: Integers that are numbers and no places: any value will do.
_NUMBERS = frozenset(
    f"aten::{name}"
    for name in (
        "add", "add_", "bitwise_not", "cat", "clone", "copy_", "eq", "fill_", "ge", "gt", "le",
        "lt", "masked_fill", "mul", "ne", "sub", "sum", "to", "_to_copy", "where", "zero_",
    )
)  # fmt: skip

_INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})


@dataclass(frozen=True)
class Shape:
    """Sizes and strides of a tensor of a step."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements of memory from the first to the last."""
        if 0 in self.sizes:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))


@dataclass(frozen=True)
class Arguments:
    """What an operation takes in a step: the shapes of its tensors, and its integers."""

    tensors: tuple[Shape, ...]
    scalars: tuple[int, ...]


def arguments(
    op: Operation, formulas: Sequence[Affine | None], num_tokens: int, num_reqs: int
) -> Arguments:
    """The tensors and integers that `op` takes in a step of `num_tokens` in `num_reqs` requests.

    Raises TraceError where a size that the request decides has no formula.
    """
    remaining = iter(formulas or [None] * sum(1 for _ in op.dims()))

    def size(dim: Dim) -> int:
        return size_at(dim, next(remaining), num_tokens, num_reqs)

    tensors = tuple(shape_at(spec, [size(dim) for dim in spec.dims]) for spec in op.inputs)
    for spec in op.outputs:
        for _ in spec.dims:
            next(remaining)
    return Arguments(tensors, tuple(size(dim) for dim in op.scalars))


def size_at(dim: Dim, formula: Affine | None, num_tokens: int, num_reqs: int) -> int:
    """A size in another step: fixed unless the request decides it."""
    if formula is not None:
        return formula(num_tokens, num_reqs)
    if dim.label.from_request:
        raise TraceError(f"a size of {dim.size} ({dim.label}) has no formula: it is planned")
    return dim.size


def shape_at(spec: TensorSpec, sizes: Sequence[int]) -> Shape:
    """The tensor of `spec` at other sizes, laid out alike.

    From the innermost dimension outwards a stride is what is inside it, times
    or plus what it was above that: a slice of a wider tensor stays one, and a
    transposed tensor stays transposed. Repeated dimensions keep their stride 0.
    """
    strides = list(spec.strides)
    before, after = 1, 1  # elements inside, as traced and now
    inner_first = sorted(
        (i for i, stride in enumerate(spec.strides) if stride),
        key=lambda i: (spec.strides[i], spec.dims[i].size, i),
    )
    for i in inner_first:
        traced = spec.strides[i]
        strides[i] = traced // before * after if traced % before == 0 else traced - before + after
        before, after = traced * spec.dims[i].size, strides[i] * sizes[i]
    return Shape(tuple(sizes), tuple(strides))


def integer_bound(op: Operation, shapes: Sequence[Shape]) -> int | None:
    """Below what the integers that `op` reads must stay; None where no rule says it."""
    base = op.name.split(".")[0]
    if base in BOUNDS:
        return max(BOUNDS[base]([shape.sizes for shape in shapes]), 1)
    return 2 if base in _NUMBERS else None


def values(count: int, bound: int) -> list[int]:
    """`count` integers from 0 up to `bound`, spread evenly and never repeated where avoidable."""
    first = max(bound // max(count, 1), 1)
    step = next(s for s in range(first, bound + 2) if math.gcd(s, bound) == 1)
    return [i * step % bound for i in range(count)]


def refusal(op: Operation, shapes: Sequence[Shape], made: Sequence[bool]) -> str:
    """Why no inputs can be made of the tensors that `made` names; empty where they can."""
    integers = [
        spec for spec, new in zip(op.inputs, made, strict=True) if new and spec.dtype in _INTEGERS
    ]
    if integers and integer_bound(op, shapes) is None:
        return f"no rule says which integers {op.name} can read"
    return ""


def tensor(spec: TensorSpec, shape: Shape, bound: int | None, device: Any) -> Any:
    """A tensor of `shape`: small random numbers, integers below `bound`, or true."""
    import torch

    dtype = getattr(torch, spec.dtype)
    extent = shape.extent
    if spec.dtype in _INTEGERS:
        flat = torch.tensor(values(extent, bound or 1), dtype=dtype)
    elif dtype is torch.bool:
        flat = torch.ones(extent, dtype=dtype)
    else:
        generator = torch.Generator().manual_seed(extent)
        flat = (torch.randn(extent, generator=generator) / 8).to(dtype)
    return flat.to(device).as_strided(shape.sizes, shape.strides)


def generated(
    op: Operation,
    formulas: Sequence[Affine | None],
    num_tokens: int,
    num_reqs: int,
    captured: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """`captured` arguments of a call of `op`, with what the request decides made anew.

    Weights, and whatever else no size of the request is in, stay as captured.
    Raises TraceError with the reason where that cannot be done.
    """
    import torch
    from torch.utils._pytree import tree_flatten, tree_unflatten

    wanted = arguments(op, formulas, num_tokens, num_reqs)
    leaves, structure = tree_flatten((captured[0], dict(captured[1])))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    integers = [i for i, leaf in enumerate(leaves) if _is_scalar(leaf)]
    if len(tensors) != len(op.inputs) or len(integers) != len(op.scalars):
        raise TraceError(f"{op.name} was captured with other arguments than it was traced with")
    made = [any(dim.label.from_request for dim in spec.dims) for spec in op.inputs]
    if reason := refusal(op, wanted.tensors, made):
        raise TraceError(reason)
    bound = integer_bound(op, wanted.tensors)
    for i, spec, shape, new in zip(tensors, op.inputs, wanted.tensors, made, strict=True):
        if new:
            leaves[i] = tensor(spec, shape, bound, leaves[i].device)
    for i, dim, value in zip(integers, op.scalars, wanted.scalars, strict=True):
        if dim.label.from_request:
            leaves[i] = value
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs


def _is_scalar(leaf: Any) -> bool:
    """What the tracer records as an integer: no truth value, no pointer."""
    return isinstance(leaf, int) and not isinstance(leaf, bool) and abs(leaf) < 2**40
