"""Rules of parts: splitting, slicing, indexing, and joining tensors again."""

from __future__ import annotations

from dooly_backend.tracing.call import Call, along, is_shape, joined, preserve, rule
from dooly_backend.tracing.labels import LITERAL, NONE, Dim, Label, Shape

# -- cutting -------------------------------------------------------------------------------


@rule("aten::split", "aten::split_with_sizes", "aten::split_with_sizes_copy", "aten::chunk",
      "aten::tensor_split", "aten::unsafe_split", "aten::unsafe_chunk", "aten::hsplit")  # fmt: skip
def split_tensor(call: Call) -> list[Shape]:
    """Parts keep the other dimensions; the cut one is the caller's size or the whole's origin."""
    position = 1 if call.name.endswith("hsplit") and len(call.args[0]) > 1 else 0
    shape, dim = along(call, 2, default=position)
    return [
        (*shape[:dim], _part(call, shape[dim], sizes[dim]), *shape[dim + 1 :])
        for sizes in call.outputs
    ]


def _part(call: Call, whole: Dim, size: int) -> Dim:
    """One of the parts of `whole`."""
    if size == whole.size:
        return whole
    for hint in call.hints:
        if hint.size == size and hint.label:
            return hint
    if size < 2:
        return Dim(size)
    if size in call.requests:
        return Dim(size, call.requests[size])
    return Dim(size, whole.label)


@rule("aten::slice", "aten::narrow")
def slice_tensor(call: Call) -> list[Shape]:
    shape, dim = along(call, 1)
    ((*_, size),) = (sizes[: dim + 1] for sizes in call.outputs)
    return [(*shape[:dim], _sliced(call, shape[dim], size), *shape[dim + 1 :])]


def _sliced(call: Call, whole: Dim, size: int) -> Dim:
    """What a slice leaves of `whole`, from where its bounds come from."""
    if size == whole.size:
        return whole
    if size < 2:
        return Dim(size)
    if size in call.requests:
        return Dim(size, call.requests[size])
    start, end = call.argument(2, "start"), call.argument(3, "end")
    step = call.argument(4, "step", 1)
    if call.name == "aten::narrow":
        start, end, step = None, call.argument(3, "length"), 1
    start = 0 if start is None else int(start)
    open_ended = end is None or int(end) >= whole.size
    if open_ended or int(end) < 0:
        bounds = [whole, call.given(abs(start))]
        if open_ended and _cancel(*bounds):
            return Dim(size, Label.of(LITERAL, size))
        if not open_ended:
            bounds.append(call.given(-int(end)))
        return Dim(size, joined(bounds))
    # From the front, the bounds alone decide: the whole may be as long as it likes.
    given = [call.given(int(end)), call.given(abs(start)), call.given(int(step or 1))]
    return Dim(size, joined(given) or whole.label)


def _cancel(whole: Dim, start: Dim) -> bool:
    """Whether both count the same thing of the request, so that it leaves their difference.

    The start offsets of all requests without those of the decodes are a
    constant: they are cut by the number of decodes.
    """
    bases = whole.label.bases
    return (
        len(bases) == 1
        and bases == start.label.bases
        and whole.label.from_request
        and all(
            any(abs(dim.size - source.value) < 2 for source in dim.label.sources)
            for dim in (whole, start)
        )
    )


@rule("aten::select")
def select(call: Call) -> list[Shape]:
    shape, dim = along(call, 1)
    return [(*shape[:dim], *shape[dim + 1 :])]


@rule("aten::unbind")
def unbind(call: Call) -> list[Shape]:
    shape, dim = along(call, 1)
    return [(*shape[:dim], *shape[dim + 1 :])] * len(call.outputs)


@rule("aten::diagonal", "aten::diag")
def diagonal(call: Call) -> list[Shape]:
    """The shorter of two dimensions, at the end; or a matrix of one."""
    shape = call.args[0]
    (sizes,) = call.outputs
    if len(sizes) > len(shape):
        return [tuple(Dim(size, shape[0].label) for size in sizes)]
    first, second = call.argument(2, "dim1", 0), call.argument(3, "dim2", 1)
    first, second = int(first) % len(shape), int(second) % len(shape)
    rest = [d for i, d in enumerate(shape) if i not in (first, second)]
    shorter = min(shape[first], shape[second], key=lambda d: d.size)
    return [(*rest, Dim(sizes[-1], shorter.label))]


# -- joining -------------------------------------------------------------------------------


@rule("aten::cat", "aten::concat", "aten::concatenate")
def cat(call: Call) -> list[Shape]:
    """The joined dimension comes from all its parts."""
    shapes = [s for s in call.args[0] if len(s) and not (len(s) == 1 and s[0].size == 0)]
    if not shapes:
        return preserve(call)
    dim = int(call.argument(1, "dim", 0)) % len(shapes[0])
    (sizes,) = call.outputs
    return [(*shapes[0][:dim], _union(call, [s[dim] for s in shapes], sizes[dim]),
             *shapes[0][dim + 1 :])]  # fmt: skip


def _union(call: Call, parts: list[Dim], size: int) -> Dim:
    if len(parts) == 1:
        return parts[0]
    if size in call.requests:
        return Dim(size, call.requests[size])
    # Parts of one element are counted by the code that lists them.
    return Dim(size, joined(parts) or Label.of(LITERAL, size))


@rule("aten::stack")
def stack(call: Call) -> list[Shape]:
    """One new dimension: as long as the list, which the request or the code decides."""
    shapes = call.args[0]
    dim = int(call.argument(1, "dim", 0)) % (len(shapes[0]) + 1)
    (sizes,) = call.outputs
    return [(*shapes[0][:dim], call.given(sizes[dim]), *shapes[0][dim:])]


@rule("aten::vstack", "aten::hstack", "aten::dstack", "aten::block_diag")
def stack_along(call: Call) -> list[Shape]:
    """Dimensions that all parts share stay; the one that grew comes from all of them."""
    shapes = call.args[0]
    (sizes,) = call.outputs
    parts = [d for s in shapes for d in s]
    return [
        tuple(
            same[0] if (same := [d for d in parts if d.size == size and d.label])
            else Dim(size, joined(parts))
            for size in sizes
        )
    ]  # fmt: skip


@rule("aten::meshgrid")
def meshgrid(call: Call) -> list[Shape]:
    dims = [s[0] if len(s) else Dim(1) for s in call.args[0]]
    if call.kwargs.get("indexing") == "xy" and len(dims) > 1:
        dims[0], dims[1] = dims[1], dims[0]
    return [tuple(dims)] * len(call.outputs)


# -- indexing ------------------------------------------------------------------------------


@rule("aten::index_select")
def index_select(call: Call) -> list[Shape]:
    shape, dim = along(call, 1)
    index = call.argument(2, "index")
    return [(*shape[:dim], *(index or (Dim(1),)), *shape[dim + 1 :])]


@rule("aten::index")
def index(call: Call) -> list[Shape]:
    """Advanced indexing: the indices' broadcast shape takes the place of what they index."""
    shape, indices = call.args[0], list(call.argument(1, "indices"))
    (sizes,) = call.outputs
    used = [i for i, value in enumerate(indices) if is_shape(value)]
    given = [indices[i] for i in used]
    if not given or any(len(s) != len(given[0]) for s in given):
        return preserve(call)
    common = tuple(
        max(dims, key=lambda d: (d.size, bool(d.label))) for dims in zip(*given, strict=True)
    )
    adjacent = used == list(range(used[0], used[0] + len(used)))
    kept = [d for i, d in enumerate(shape) if i not in used]
    front = used[0] if adjacent else 0
    candidate = (*kept[:front], *common, *kept[front:])
    # A mask of booleans selects as many elements as it likes: matched by shape.
    return [candidate] if tuple(d.size for d in candidate) == sizes else preserve(call)


@rule("aten::gather")
def gather(call: Call) -> list[Shape]:
    return [call.argument(2, "index")]


@rule("aten::take_along_dim", "aten::take")
def take(call: Call) -> list[Shape]:
    return [call.argument(1, "indices", call.kwargs.get("index", ()))]


@rule("aten::embedding")
def embedding(call: Call) -> list[Shape]:
    weight, indices = call.args[0], call.args[1]
    return [(*indices, weight[-1])]


@rule("aten::searchsorted", "aten::bucketize")
def searchsorted(call: Call) -> list[Shape]:
    """As many positions as there are values to look up."""
    values = call.args[1] if call.name.endswith("searchsorted") else call.args[0]
    return [values if is_shape(values) else ()]


@rule("aten::one_hot")
def one_hot(call: Call) -> list[Shape]:
    """A new last dimension of as many classes as the caller says."""
    (sizes,) = call.outputs
    return [(*call.args[0], call.known(sizes[-1]))]


@rule("aten::nonzero", "aten::argwhere")
def nonzero(call: Call) -> list[Shape]:
    """As many rows as the values decide; a column for each dimension."""
    (sizes,) = call.outputs
    rows = Dim(sizes[0], joined(call.args[0]) if sizes[0] > 1 else NONE)
    return [(rows, Dim(sizes[1], Label.of(LITERAL, sizes[1]) if sizes[1] > 1 else NONE))]
