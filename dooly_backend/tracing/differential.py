"""The differential check: what really changes when the step changes.

Passes at three different (T, R) solve every size of the pass as
``a + b*T + c*R``; a fourth pass, held out, tests the formulas. Labels that
contradict a formula are counted and repaired, so that taint labels stay the
annotation and the formulas the proof (and the source of generated inputs).
What runs outside the modules (input preparation) is checked the same way
where it runs the same operations in every pass, and left alone where not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from dooly_backend.errors import TraceError
from dooly_backend.tracing.labels import (
    ENGINE,
    LITERAL,
    NONE,
    NUM_REQS,
    NUM_TOKS,
    REQUEST_BASES,
    Dim,
    Label,
    Source,
)
from dooly_backend.tracing.trace import STEP, Affine, CheckResult, Operation, TensorSpec

#: Multiples that an engine may pad a size to.
_QUANTA = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Pass:
    """The operations of one pass of `num_tokens` tokens in `num_reqs` requests."""

    num_tokens: int
    num_reqs: int
    operations: tuple[Operation, ...]

    @property
    def of_modules(self) -> tuple[Operation, ...]:
        """Operations inside modules; input preparation may depend on the batch as a program.

        Launches past the dispatcher have no sizes, and may be others in a larger batch.
        """
        return tuple(op for op in self.operations if op.path != STEP and not op.is_launch)

    @property
    def outside(self) -> tuple[Operation, ...]:
        """Operations outside modules."""
        return tuple(op for op in self.operations if op.path == STEP)


def check(
    labelled: Pass, others: Sequence[Pass], held_out: Pass, planning: Collection[str] = ()
) -> tuple[CheckResult, dict[int, tuple[Affine | None, ...]], tuple[Operation, ...]]:
    """Compare `labelled` with two `others` and a `held_out` pass.

    Returns the result, the formulas by operation index, and the operations with
    repaired labels. `planning` names modules that divide their own work (MoE
    layers): sizes inside them that follow the request may have no formula.
    Raises TraceError naming the operation at which the passes run different
    operations, or whose size no formula predicts.
    """
    passes = (labelled, *others, held_out)
    for other in passes[1:]:
        _same_operations(labelled.of_modules, other.of_modules)
    formulas: dict[int, tuple[Affine | None, ...]] = {}
    operations = list(labelled.operations)
    counts = Counts(planning)
    for row in zip(*(p.of_modules for p in passes), strict=True):
        solved = [_formula(passes, values) for values in _values(row)]
        solved = _without_chance(row[0], solved, planning)
        _refuse_unpredicted(row[0], _values(row), solved, planning)
        counts.add(row, solved)
        formulas[row[0].index] = tuple(solved)
        operations[row[0].index] = _repaired(row[0], solved, labelled)
    outside = _check_outside(passes, operations)
    return (
        CheckResult(
            counts.dimensions, counts.dimensions - counts.planned, counts.agreeing,
            counts.dimensions - counts.agreeing, counts.following,
            outside.dimensions, outside.agreeing, counts.planned,
        ),
        formulas,
        tuple(operations),
    )  # fmt: skip


@dataclass
class Counts:
    """Sizes compared, those with a right label, and those whose label says if R moves them."""

    planning: Collection[str] = ()
    dimensions: int = 0
    agreeing: int = 0
    following: int = 0
    planned: int = 0  # no formula predicts them, and none needs to

    def add(self, row: Sequence[Operation], formulas: Sequence[Affine | None]) -> None:
        for dim, values, formula in zip(row[0].dims(), _values(row), formulas, strict=True):
            if formula is None and not is_planned(dim, row[0].path, self.planning):
                continue
            self.dimensions += 1
            self.planned += formula is None
            self.agreeing += agrees(dim, formula) if formula else True
            # The first of the other passes has as many tokens, in other requests.
            self.following += (NUM_REQS in dim.label.bases) == (values[0] != values[1])


def _check_outside(passes: Sequence[Pass], operations: list[Operation]) -> Counts:
    """Check and repair what runs outside the modules, as far as it can be compared."""
    counts = Counts()
    rows = [p.outside for p in passes]
    try:
        for other in rows[1:]:
            _same_operations(rows[0], other)
    except TraceError:  # input preparation runs operations for each request
        return counts
    for row in zip(*rows, strict=True):
        solved = [_formula(passes, values) for values in _values(row)]
        counts.add(row, solved)
        operations[row[0].index] = _repaired(row[0], solved, passes[0])
    return counts


def _values(row: Sequence[Operation]) -> list[tuple[int, ...]]:
    """For every size of an operation, what it is in each pass."""
    return list(zip(*([dim.size for dim in op.dims()] for op in row), strict=True))


def _formula(passes: Sequence[Pass], values: Sequence[int]) -> Affine | None:
    """The formula of a size, None where none predicts the last, held-out pass.

    Only a size that no plain formula predicts is tried as a padded one.
    """
    *solving, held_out = passes
    points = [(p.num_tokens, p.num_reqs) for p in solving]
    for quantum in _QUANTA:
        if quantum == 1 or _determine(points, quantum):
            formula = solve(points, values[:-1], quantum)
        else:
            formula = _solve_one_sided(points, values[:-1], quantum)
        if formula and formula(held_out.num_tokens, held_out.num_reqs) == values[-1]:
            return formula
    return None


def _determine(points: Sequence[tuple[int, int]], quantum: int) -> bool:
    """Whether the points, rounded up, still determine a formula."""
    (t0, r0), (t1, r1), (t2, r2) = ((-(-t // quantum), -(-r // quantum)) for t, r in points)
    return (t1 - t0) * (r2 - r0) != (t2 - t0) * (r1 - r0)


def _solve_one_sided(
    points: Sequence[tuple[int, int]], values: Sequence[int], quantum: int
) -> Affine | None:
    """A formula of the requests alone, or else of the tokens alone.

    For padded sizes where the other of them rounds up to the same number in
    all passes, so that nothing can be told of it.
    """
    for side in (1, 0):
        rounded = [-(-point[side] // quantum) * quantum for point in points]
        by_size = dict(zip(rounded, values, strict=True))
        if len(by_size) != 2:
            continue
        (x0, v0), (x1, v1) = by_size.items()
        slope = Fraction(v1 - v0, x1 - x0)
        constant = v0 - slope * x0
        if slope.denominator != 1 or constant.denominator != 1:
            continue
        parts = (0, int(slope)) if side else (int(slope), 0)
        formula = Affine(int(constant), *parts, quantum)
        if all(formula(*point) == v for point, v in zip(points, values, strict=True)):
            return formula
    return None


def _without_chance(
    op: Operation, formulas: Sequence[Affine | None], planning: Collection[str]
) -> list[Affine | None]:
    """No formula for what a module plans by the request and was the same in all passes.

    Passes of few tokens more or less are divided into as many blocks: that is no constant
    of the model.
    """
    return [
        None if formula and not formula.from_request and _by_chance(dim, op, planning) else formula
        for dim, formula in zip(op.dims(), formulas, strict=True)
    ]


def _by_chance(dim: Dim, op: Operation, planning: Collection[str]) -> bool:
    """Whether a size that no pass changed is one that the request moves nevertheless."""
    return dim.size > 1 and ENGINE not in dim.label.bases and is_planned(dim, op.path, planning)


def _refuse_unpredicted(
    op: Operation,
    values: Sequence[Sequence[int]],
    formulas: Sequence[Affine | None],
    planning: Collection[str],
) -> None:
    """Raise TraceError when a size has no formula, unless a kernel plans it."""
    for dim, sizes, formula in zip(op.dims(), values, formulas, strict=True):
        if formula is None and not is_planned(dim, op.path, planning):
            raise TraceError(
                f"{op.name} in {op.path}: a size that is {sizes[0]} in the traced pass is no "
                f"affine function of tokens and requests ({list(sizes[:-1])} and {sizes[-1]}); "
                "the operation needs a rule of its own"
            )


def is_planned(dim: Dim, path: str, planning: Collection[str] = ()) -> bool:
    """Whether the engine sizes a buffer by how it divides the request's work.

    A scheduler that splits a prefill among threads once it is long enough fits
    no formula; its buffer is an input of the kernel it plans, and of no other.
    Nor do a MoE layer's blocks of tokens, whose size it looks up by how many
    tokens there are (`moe_align_block_size`); they stay inside the layer, which
    is measured whole.
    """
    if not dim.label.from_request:
        return False
    return ENGINE in dim.label.bases or any(
        path == module or path.startswith(f"{module}.") for module in planning
    )


def solve(
    points: Sequence[tuple[int, int]], values: Sequence[int], quantum: int = 1
) -> Affine | None:
    """Integers a, b, c with ``a + b*T + c*R`` equal to `values` at three `points`.

    T and R are rounded up to multiples of `quantum`. None when there are none.
    Raises ValueError when the points are collinear.
    """
    (t0, r0), (t1, r1), (t2, r2) = (
        (-(-t // quantum) * quantum, -(-r // quantum) * quantum) for t, r in points
    )
    v0, v1, v2 = values
    determinant = (t1 - t0) * (r2 - r0) - (t2 - t0) * (r1 - r0)
    if determinant == 0:
        raise ValueError(f"the passes {points} lie on a line and determine no formula")
    tokens = Fraction((v1 - v0) * (r2 - r0) - (v2 - v0) * (r1 - r0), determinant)
    requests = Fraction((t1 - t0) * (v2 - v0) - (t2 - t0) * (v1 - v0), determinant)
    constant = v0 - tokens * t0 - requests * r0
    if any(part.denominator != 1 for part in (tokens, requests, constant)):
        return None
    return Affine(int(constant), int(tokens), int(requests), quantum)


def agrees(dim: Dim, formula: Affine) -> bool:
    """Whether a label says just what the formula says.

    The request bases are those that the formula has, neither more nor fewer;
    so a constant has none. A size above 1 has a label. A mix with a constant
    is not the plain number of tokens or requests.
    """
    bases = dim.label.bases & REQUEST_BASES
    if not dim.label:
        return not formula.from_request and dim.size < 2
    if (NUM_TOKS in bases) != bool(formula.tokens) or (NUM_REQS in bases) != bool(formula.requests):
        return False
    is_plain = {formula.tokens, formula.requests} <= {0, 1} and abs(formula.constant) < 2
    return not (bases and dim.label.bases - REQUEST_BASES and is_plain)


def _same_operations(reference: Sequence[Operation], other: Sequence[Operation]) -> None:
    for mine, theirs in zip(reference, other, strict=False):
        if (mine.path, mine.name) != (theirs.path, theirs.name):
            raise TraceError(
                f"the passes diverge at {mine.name} in {mine.path}: "
                f"another batch runs {theirs.name} in {theirs.path}"
            )
        if len(list(mine.dims())) != len(list(theirs.dims())):
            raise TraceError(
                f"{mine.name} in {mine.path} has other arguments in another batch: "
                "its number of dimensions depends on the request"
            )
    if len(reference) != len(other):
        longer = max(reference, other, key=len)
        extra = longer[min(len(reference), len(other))]
        raise TraceError(f"only one of the passes runs {extra.name} in {extra.path}")


def _repaired(op: Operation, formulas: Sequence[Affine | None], labelled: Pass) -> Operation:
    remaining = iter(formulas)

    def mend(dim: Dim) -> Dim:
        formula = next(remaining)
        if formula is None or agrees(dim, formula):
            return dim
        return Dim(dim.size, _label(dim, formula, labelled))

    def tensor(spec: TensorSpec) -> TensorSpec:
        return replace(spec, dims=tuple(mend(d) for d in spec.dims))

    return replace(
        op,
        inputs=tuple(tensor(t) for t in op.inputs),
        outputs=tuple(tensor(t) for t in op.outputs),
        scalars=tuple(mend(d) for d in op.scalars),
    )


def _label(dim: Dim, formula: Affine, labelled: Pass) -> Label:
    """The label that a formula implies; what is not the request's stays as it was labelled."""
    sources = {s for s in dim.label.sources if s.base not in REQUEST_BASES}
    if formula.tokens:
        sources.add(Source(NUM_TOKS, labelled.num_tokens))
    if formula.requests:
        sources.add(Source(NUM_REQS, labelled.num_reqs))
    if not sources and not formula.from_request:
        return Label.of(LITERAL, dim.size) if dim.size > 1 else NONE
    return Label(frozenset(sources))
