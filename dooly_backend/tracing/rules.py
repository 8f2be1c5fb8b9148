"""Rules of creation and of views: new tensors, and old ones in another shape.

Importing this module registers every rule; `MAPPING` is what the tracer uses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dooly_backend.tracing import collectives, rules_compute, rules_parts
from dooly_backend.tracing.call import (
    MAPPING,
    Call,
    Rule,
    TensorShape,
    along,
    is_shape,
    joined,
    preserve,
    rule,
)
from dooly_backend.tracing.labels import LITERAL, Dim, Label, Shape, view

# -- creation ------------------------------------------------------------------------------


@rule("aten::empty", "aten::zeros", "aten::ones", "aten::full", "aten::rand", "aten::randn",
      "aten::randint", "aten::empty_strided", "aten::new_empty", "aten::new_zeros",
      "aten::new_ones", "aten::new_full", "aten::new_empty_strided",
      "aten::empty_permuted")  # fmt: skip
def create(call: Call) -> list[Shape]:
    """New tensors: the caller's integers, in order."""
    return [_created(call, sizes) for sizes in call.outputs]


def _created(call: Call, sizes: tuple[int, ...]) -> Shape:
    hinted = call.hinted(sizes)
    if hinted is None:
        return tuple(call.known(size) for size in sizes)
    return tuple(dim if dim.label else call.known(dim.size) for dim in hinted)


@rule("aten::arange", "aten::linspace", "aten::range", "aten::randperm", "aten::hann_window")
def arange(call: Call) -> list[Shape]:
    """One dimension, as long as the range: of the origin of the end (and of the start)."""
    ((size,),) = call.outputs
    dim = call.known(size)
    if dim.label and dim.label.name != LITERAL:
        return [(dim,)]
    bounds = [value for value in call.args if isinstance(value, int)]
    label = joined([call.given(abs(value)) for value in bounds])
    return [(Dim(size, label or dim.label),)]


@rule("aten::eye", "aten::tril_indices", "aten::triu_indices")
def create_by_name(call: Call) -> list[Shape]:
    return [tuple(call.known(size) for size in sizes) for sizes in call.outputs]


# -- views ---------------------------------------------------------------------------------


@rule("aten::view", "aten::reshape", "aten::_unsafe_view", "aten::_reshape_alias",
      "aten::flatten", "aten::unflatten", "aten::ravel")  # fmt: skip
def reshape(call: Call) -> list[Shape]:
    """Merge and split (mix(H)); the caller's labelled integers settle what H leaves open."""
    shape = call.args[0]
    (sizes,) = call.outputs
    if math.prod(d.size for d in shape) != math.prod(sizes):
        return dtype_view(call)
    hinted = call.hinted(sizes)
    result = view(shape, sizes, hinted)
    if hinted is None:
        return [result]
    return [tuple(_settled(d, h, shape) for d, h in zip(result, hinted, strict=True))]


def _settled(dim: Dim, hint: Dim, shape: Shape) -> Dim:
    """The better of what a view makes of a dimension and what the caller says it is."""
    if not hint.label or dim.size < 2:
        return dim
    if not dim.label:
        return hint
    if hint.label.name == LITERAL:
        # A constant of the code cuts a dimension of the model in parts of its own size.
        is_new = all(d.size != dim.size for d in shape)
        return hint if is_new and not dim.label.from_request else dim
    return hint if dim.label.name in ("mix", LITERAL) or not dim.label.from_request else dim


def dtype_view(call: Call) -> list[Shape]:
    """A view as another dtype: the last dimension grows or shrinks, of the same origin."""
    shape = call.args[0]
    (sizes,) = call.outputs
    if len(shape) != len(sizes) or not shape:
        return preserve(call)
    return [(*shape[:-1], Dim(sizes[-1], shape[-1].label))]


@rule("aten::view_as", "aten::reshape_as", "aten::expand_as")
def like_another(call: Call) -> list[Shape]:
    """The second tensor's shape."""
    return [call.argument(1, "other")]


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


@rule("aten::movedim", "aten::moveaxis")
def movedim(call: Call) -> list[Shape]:
    shape = call.args[0]
    sources, targets = (
        [int(i) % len(shape) for i in (v if isinstance(v, (list, tuple)) else [v])]
        for v in (call.argument(1, "source"), call.argument(2, "destination"))
    )
    order = [i for i in range(len(shape)) if i not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        order.insert(target, source)
    return [tuple(shape[i] for i in order)]


@rule("aten::transpose", "aten::swapaxes", "aten::swapdims")
def transpose(call: Call) -> list[Shape]:
    dims = list(call.args[0])
    a, b = call.argument(1, "dim0"), call.argument(2, "dim1")
    dims[a], dims[b] = dims[b], dims[a]
    return [tuple(dims)]


@rule("aten::t", "aten::numpy_T", "aten::adjoint", "aten::mT")
def transpose_matrix(call: Call) -> list[Shape]:
    *batch, rows, columns = ([Dim(1)] * (2 - len(call.args[0]))) + list(call.args[0])
    return [(*batch, columns, rows)] if len(call.args[0]) > 1 else [call.args[0]]


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
    ]  # fmt: skip


@rule("aten::as_strided", "aten::unfold")
def restrided(call: Call) -> list[Shape]:
    """Any sizes over the same memory: the caller's integers, else those of the tensor."""
    (sizes,) = call.outputs
    hinted = call.hinted(sizes)
    if hinted and all(dim.label or dim.size < 2 for dim in hinted):
        return [tuple(hinted)]
    return preserve(call)


# -- copies that grow ----------------------------------------------------------------------


@rule("aten::repeat", "aten::tile")
def repeat(call: Call) -> list[Shape]:
    """Each dimension comes from the old one and from how often it is repeated."""
    shape, times = call.args[0], call.argument(1, "repeats", ()) or call.kwargs.get("dims", ())
    (sizes,) = call.outputs
    return [tuple(_repeated(call, shape, times, sizes))]


def _repeated(call: Call, shape: Shape, times: Sequence[int], sizes: Sequence[int]) -> list[Dim]:
    old = [Dim(1)] * (len(sizes) - len(shape)) + list(shape)
    factors = [1] * (len(sizes) - len(times)) + [int(t) for t in times]
    return [
        dim if dim.size == size else Dim(size, joined([dim, call.given(factor)]))
        for dim, factor, size in zip(old, factors, sizes, strict=True)
    ]


@rule("aten::repeat_interleave")
def repeat_interleave(call: Call) -> list[Shape]:
    """Along one dimension: an integer multiplies it; a tensor of counts sums to the new size."""
    (sizes,) = call.outputs
    repeats = call.argument(1, "repeats")
    if repeats is None or call.argument(2, "dim") is None:
        return preserve(call)
    shape, dim = along(call, 2)
    old = shape[dim]
    if is_shape(repeats):
        new = call.known(sizes[dim])
        new = new if new.label else Dim(new.size, old.label)
    else:
        new = Dim(sizes[dim], joined([old, call.given(int(repeats))]))
    return [(*shape[:dim], new, *shape[dim + 1 :])]


@rule("aten::pad", "aten::constant_pad_nd", "aten::reflection_pad1d", "aten::replication_pad1d")
def pad(call: Call) -> list[Shape]:
    """Pairs of (before, after), from the last dimension backwards."""
    shape, amounts = list(call.args[0]), [int(a) for a in call.argument(1, "pad")]
    (sizes,) = call.outputs
    for position in range(len(amounts) // 2):
        index = len(shape) - 1 - position
        added = [call.given(abs(a)) for a in amounts[2 * position : 2 * position + 2] if a]
        if added:
            shape[index] = Dim(sizes[index], joined([shape[index], *added]))
    return [tuple(shape)]


__all__ = [
    "MAPPING",
    "Call",
    "Label",
    "Rule",
    "TensorShape",
    "collectives",
    "is_shape",
    "preserve",
    "rule",
    "rules_compute",
    "rules_parts",
]
