"""The differential check: what really changes when the step changes.

Passes at three different (T, R) solve every size of the pass as
``a + b*T + c*R``; a fourth pass, held out, tests the formulas. Labels that
contradict a formula are counted and repaired, so that taint labels stay the
annotation and the formulas the proof (and the source of generated inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from dooly_backend.errors import TraceError
from dooly_backend.tracing.labels import (
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


@dataclass(frozen=True)
class Pass:
    """The operations of one pass of `num_tokens` tokens in `num_reqs` requests."""

    num_tokens: int
    num_reqs: int
    operations: tuple[Operation, ...]

    @property
    def of_modules(self) -> tuple[Operation, ...]:
        """Operations inside modules; input preparation may depend on the batch as a program."""
        return tuple(op for op in self.operations if op.path != STEP)


def check(labelled: Pass, others: Sequence[Pass], held_out: Pass) -> tuple[
    CheckResult, dict[int, tuple[Affine | None, ...]], tuple[Operation, ...]
]:
    """Compare `labelled` with two `others` and a `held_out` pass.

    Returns the result, the formulas by operation index, and the operations with
    repaired labels. Raises TraceError naming the operation at which the passes
    run different operations, or whose size no formula predicts.
    """
    reference = labelled.of_modules
    for other in (*others, held_out):
        _same_operations(reference, other.of_modules)
    formulas: dict[int, tuple[Affine | None, ...]] = {}
    operations = list(labelled.operations)
    counts = {"dimensions": 0, "predicted": 0, "agreeing": 0, "repaired": 0}
    rows = zip(
        reference, *(p.of_modules for p in others), held_out.of_modules, strict=True
    )
    points = [(p.num_tokens, p.num_reqs) for p in (labelled, *others)]
    for op, *rest in rows:
        solved: list[Affine | None] = []
        dims = list(op.dims())
        for position, dim in enumerate(dims):
            values = [dim.size, *(list(o.dims())[position].size for o in rest[:-1])]
            formula = solve(points, values)
            expected = list(rest[-1].dims())[position].size
            counts["dimensions"] += 1
            if formula is None or formula(held_out.num_tokens, held_out.num_reqs) != expected:
                raise TraceError(
                    f"{op.name} in {op.path}: a size that is {dim.size} in the traced pass is no "
                    f"affine function of tokens and requests ({values} and {expected}); "
                    "the operation needs a rule of its own"
                )
            counts["predicted"] += 1
            solved.append(formula)
            if agrees(dim, formula):
                counts["agreeing"] += 1
            else:
                counts["repaired"] += 1
        formulas[op.index] = tuple(solved)
        operations[op.index] = _repaired(op, solved, labelled)
    return CheckResult(**counts), formulas, tuple(operations)


def solve(points: Sequence[tuple[int, int]], values: Sequence[int]) -> Affine | None:
    """Integers a, b, c with ``a + b*T + c*R`` equal to `values` at three `points`.

    None when there are none. Raises ValueError when the points are collinear.
    """
    (t0, r0), (t1, r1), (t2, r2) = points
    v0, v1, v2 = values
    determinant = (t1 - t0) * (r2 - r0) - (t2 - t0) * (r1 - r0)
    if determinant == 0:
        raise ValueError(f"the passes {points} lie on a line and determine no formula")
    tokens = Fraction((v1 - v0) * (r2 - r0) - (v2 - v0) * (r1 - r0), determinant)
    requests = Fraction((t1 - t0) * (v2 - v0) - (t2 - t0) * (v1 - v0), determinant)
    constant = v0 - tokens * t0 - requests * r0
    if any(part.denominator != 1 for part in (tokens, requests, constant)):
        return None
    return Affine(int(constant), int(tokens), int(requests))


def agrees(dim: Dim, formula: Affine) -> bool:
    """Whether a label claims just the request dependence that the formula has."""
    bases = dim.label.bases & REQUEST_BASES
    return (NUM_TOKS in bases) == bool(formula.tokens) and (NUM_REQS in bases) == bool(
        formula.requests
    )


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
