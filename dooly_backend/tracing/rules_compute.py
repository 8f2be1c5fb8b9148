"""Rules of operations that compute: contractions, reductions, and the engine's own sizes."""

from __future__ import annotations

from dooly_backend.tracing.call import Call, along, is_shape, joined, matched, preserve, rule
from dooly_backend.tracing.labels import ENGINE, NONE, Dim, Label, Shape

# -- contractions --------------------------------------------------------------------------


@rule("aten::linear")
def linear(call: Call) -> list[Shape]:
    x, weight = call.args[0], call.args[1]
    return [(*x[:-1], *weight[:-1])]


@rule("aten::mm", "aten::matmul", "aten::bmm", "aten::mv", "aten::dot", "aten::_scaled_mm")
def matmul(call: Call) -> list[Shape]:
    return [_matmul(call.args[0], call.args[1])]


@rule("aten::addmm", "aten::baddbmm", "aten::addmv")
def add_matmul(call: Call) -> list[Shape]:
    return [_matmul(call.args[1], call.args[2])]


def _matmul(a: Shape, b: Shape) -> Shape:
    """[..., n, k] x [..., k, m]: the batch is broadcast, k is contracted."""
    if len(b) == 1:
        return tuple(a[:-1])
    if len(a) == 1:
        return (*b[:-2], b[-1])
    return (*_broadcast(a[:-2], b[:-2]), a[-2], b[-1])


def _broadcast(a: Shape, b: Shape) -> Shape:
    length = max(len(a), len(b))
    first = (*[Dim(1)] * (length - len(a)), *a)
    second = (*[Dim(1)] * (length - len(b)), *b)
    return tuple(
        x if x.size > 1 and (x.label or y.size == 1) else y
        for x, y in zip(first, second, strict=True)
    )


@rule("aten::outer", "aten::ger")
def outer(call: Call) -> list[Shape]:
    return [(call.args[0][0], call.args[1][0])]


@rule("aten::einsum")
def einsum(call: Call) -> list[Shape]:
    """Letters name dimensions: an output letter is the dimension that an input gave it."""
    equation = str(call.argument(0, "equation")).replace(" ", "")
    operands = [s for s in call.argument(1, "tensors") if is_shape(s)]
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if "." in equation or not arrow or len(terms) != len(operands):
        return preserve(call)
    dims: dict[str, Dim] = {}
    for term, shape in zip(terms, operands, strict=True):
        for letter, dim in zip(term, shape, strict=True):
            if letter not in dims or not dims[letter].label or dims[letter].size == 1:
                dims[letter] = dim
    return [tuple(dims[letter] for letter in output)]


@rule("aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu")
def attention(call: Call) -> list[Shape]:
    """Queries by the head size of the values; further outputs are matched by shape."""
    query, value = call.args[0], call.args[2]
    others = [matched(call, sizes, call.shapes) for sizes in call.outputs[1:]]
    return [(*query[:-1], value[-1]), *others]


# -- reductions ----------------------------------------------------------------------------


@rule("aten::argmax", "aten::argmin", "aten::max", "aten::min", "aten::sum", "aten::mean",
      "aten::amax", "aten::amin", "aten::any", "aten::all", "aten::prod", "aten::logsumexp",
      "aten::var", "aten::std", "aten::nansum", "aten::median", "aten::count_nonzero",
      "aten::norm", "aten::linalg_vector_norm", "aten::var_mean", "aten::std_mean")  # fmt: skip
def reduce(call: Call) -> list[Shape]:
    """Reductions drop dimensions (or leave ones): the rest stays in order."""
    shape = call.args[0]
    position, name = (2, "dim") if "norm" in call.name else (1, "dim")
    dim = call.argument(position, name)
    return [_reduced(call, shape, sizes, dim) for sizes in call.outputs]


def _reduced(call: Call, shape: Shape, sizes: tuple[int, ...], dim: object) -> Shape:
    if dim is None or isinstance(dim, bool) or not isinstance(dim, (int, list, tuple)):
        return matched(call, sizes, call.shapes)
    if is_shape(dim):  # torch.max of two tensors
        return matched(call, sizes, call.shapes)
    listed = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    dims = {int(i) % max(len(shape), 1) for i in listed} or set(range(len(shape)))
    if len(sizes) == len(shape):
        return tuple(Dim(1) if i in dims else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in dims)


@rule("aten::topk", "aten::kthvalue", "aten::mode")
def topk(call: Call) -> list[Shape]:
    """All dimensions but the searched one, of which `k` remain."""
    position = 2 if not call.name.endswith("mode") else 1
    shape, dim = along(call, position, default=-1)
    return [
        (*shape[:dim], *([call.given(sizes[dim])] if len(sizes) == len(shape) else ()),
         *shape[dim + 1 :])
        for sizes in call.outputs
    ]  # fmt: skip


@rule("aten::multinomial")
def multinomial(call: Call) -> list[Shape]:
    """A row for each distribution, with as many samples as the caller wants."""
    (sizes,) = call.outputs
    return [(*call.args[0][:-1], call.given(sizes[-1]))]


@rule("aten::bincount", "aten::histc")
def bincount(call: Call) -> list[Shape]:
    """As many bins as the caller says at least."""
    ((size,),) = call.outputs
    return [(call.known(size),)]


# -- sizes that an engine's kernels compute ----------------------------------------------------


@rule("_C::get_scheduler_metadata", "_vllm_fa3_C::get_scheduler_metadata",
      "_vllm_fa2_C::get_scheduler_metadata")  # fmt: skip
def scheduler_metadata(call: Call) -> list[Shape]:
    """A plan of the attention kernel: a record for each request, and a part for the engine.

    The record's length and the fixed part (one slot for each thread or
    processor) are the kernel's own and appear nowhere else.
    """
    requests = joined([s[0] for s in call.shapes if len(s) == 1])
    return [
        tuple(
            Dim(size, (requests | Label.of(ENGINE, size)) if size > 1 else NONE) for size in sizes
        )
        for sizes in call.outputs
    ]
