"""Dimension rules of the collectives: a gathered dimension is as many times its part."""

from __future__ import annotations

from dooly_backend.tracing.call import Call, rule
from dooly_backend.tracing.labels import NONE, Dim, Label, Shape


@rule("dooly::all_gather", "dooly::gather", "dooly::reduce_scatter")
def along_one_dimension(call: Call) -> list[Shape]:
    """One dimension grows or shrinks by the degree and keeps its origin; the others stay."""
    shape, dim = call.args[0], int(call.argument(1, "dim"))
    (sizes,) = call.outputs
    return [(*shape[:dim], _resized(call, shape[dim], sizes[dim]), *shape[dim + 1 :])]


def _resized(call: Call, part: Dim, size: int) -> Dim:
    """A dimension of the same origin as `part`; a size of the model's is known by its value."""
    name = part.label.name
    if name in ("none", "mix"):
        return Dim(size, part.label or call.registry.get(size, NONE))
    return Dim(size, Label.of(name, size))
