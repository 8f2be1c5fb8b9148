"""The taint algebra: where the size of a dimension comes from (paper section 4, Table 1).

A label is a set of *sources*, each a base with the value it had there. The
empty set is the paper's untainted; sources of one base make a base label;
sources of several make ``mix(H)``, H being the map from value to base. Joining
labels is set union, so the paper's rules - absorption, preservation, conflict,
extend, merge - hold by construction, and joining is associative, commutative
and idempotent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

MODEL_CONFIG = "model_config"
NUM_TOKS = "num_toks"
NUM_REQS = "num_reqs"
ENGINE = "engine"
LITERAL = "literal"

BASES = (MODEL_CONFIG, NUM_TOKS, NUM_REQS, ENGINE, LITERAL)
#: What the request decides; everything else is the same for every step.
REQUEST_BASES = frozenset({NUM_TOKS, NUM_REQS})


@dataclass(frozen=True, order=True)
class Source:
    """A base and the value it stood for when it entered a size."""

    base: str
    value: int


@dataclass(frozen=True)
class Label:
    """Where a size comes from. `NONE` is the neutral element of `|`."""

    sources: frozenset[Source] = frozenset()

    @classmethod
    def of(cls, base: str, value: int) -> Label:
        if base not in BASES:
            raise ValueError(f"{base!r} is no label base: {', '.join(BASES)}")
        return cls(frozenset({Source(base, value)}))

    def __bool__(self) -> bool:
        return bool(self.sources)

    def __or__(self, other: Label) -> Label:
        """Join: what a size computed from both comes from.

        A literal is absorbed by any other base, as the constants of a formula
        (``3 * heads``) are no origin of their own.
        """
        sources = self.sources | other.sources
        origins = frozenset(s for s in sources if s.base != LITERAL)
        return Label(origins or sources)

    @property
    def bases(self) -> frozenset[str]:
        return frozenset(source.base for source in self.sources)

    @property
    def name(self) -> str:
        """One of `BASES`, "mix" for several, "none" for none."""
        bases = self.bases
        if not bases:
            return "none"
        return next(iter(bases)) if len(bases) == 1 else "mix"

    @property
    def factors(self) -> Mapping[int, str]:
        """H of ``mix(H)``: value to base. A value with two bases keeps the request's."""
        ordered = sorted(self.sources, key=lambda s: (s.base in REQUEST_BASES, s.base))
        return {source.value: source.base for source in ordered}

    @property
    def from_request(self) -> bool:
        """Whether the request decides the size, alone or together with the model."""
        return bool(self.bases & REQUEST_BASES)

    def __str__(self) -> str:
        if self.name != "mix":
            return self.name
        inner = ", ".join(f"{value}: {base}" for value, base in sorted(self.factors.items()))
        return f"mix({inner})"


NONE = Label()


@dataclass(frozen=True)
class Dim:
    """One dimension of a tensor, or one integer argument: its size and its label."""

    size: int
    label: Label = NONE

    def __str__(self) -> str:
        return f"{self.size}:{self.label}"


Shape = tuple[Dim, ...]


def merge(dims: Sequence[Dim], size: int) -> Dim:
    """The dimension of `size` that `dims` become when they are flattened into one."""
    label = NONE
    for dim in dims:
        if dim.size != 1 or len(dims) == 1:
            label = label | dim.label
    if size < 2:
        return Dim(size)
    if label.name == "mix":
        # Each whole factor goes into H too, so that splitting finds it again
        # even where it was itself a product (heads * head size).
        for dim in dims:
            if dim.label.name not in ("none", "mix"):
                label = label | Label.of(dim.label.name, dim.size)
    return Dim(size, label)


def split(dim: Dim, sizes: Sequence[int], given: Sequence[Dim] | None = None) -> Shape:
    """The dimensions that `dim` becomes when it is split into `sizes`.

    A mix is taken apart by consulting H: a part that the caller labelled with
    one of its bases (`given`) is what the caller says; a part that equals a
    factor, or the product of factors (of one base rather than of several), comes
    from those; a part that divides the factors of one base only comes from that
    base; whatever remains carries the rest of the mix.
    """
    if dim.label.name != "mix":
        return tuple(Dim(size, dim.label if size > 1 else NONE) for size in sizes)
    parts: dict[int, Dim] = {}
    for index, size in enumerate(sizes):
        hint = given[index] if given else None
        if size < 2:
            parts[index] = Dim(size)
        elif hint and hint.label.name != "mix" and hint.label.bases & dim.label.bases:
            parts[index] = hint
    # What is named already is no candidate for the other parts, while others are left.
    unnamed = _without(dim.label, parts.values())
    for index in _missing(parts, sizes):
        if found := _factor(sizes[index], unnamed) or _product(sizes[index], unnamed):
            parts[index] = found
    rest = _without(dim.label, parts.values())
    missing = _missing(parts, sizes)
    if len(missing) > 1 or not rest:
        for index in missing:
            if found := _factor(sizes[index], dim.label):
                parts[index] = found
    for index in _missing(parts, sizes):
        divisible = {s.base for s in rest.sources if s.value % sizes[index] == 0}
        sole = len(divisible) == 1 and rest.name == "mix" and len(missing) > 1
        label = _of_base(rest, divisible.pop()) if sole else rest or dim.label
        parts[index] = Dim(sizes[index], label)
    return tuple(parts[index] for index in range(len(sizes)))


def _missing(parts: Mapping[int, Dim], sizes: Sequence[int]) -> list[int]:
    return [index for index in range(len(sizes)) if index not in parts]


def _without(label: Label, known: Iterable[Dim]) -> Label:
    """The sources of `label` whose base no dimension of `known` accounts for."""
    spent = {base for dim in known for base in dim.label.bases}
    return Label(frozenset(source for source in label.sources if source.base not in spent))


def _of_base(label: Label, base: str) -> Label:
    return Label(frozenset(source for source in label.sources if source.base == base))


def _factor(size: int, label: Label) -> Dim | None:
    """The part of `label` that accounts for `size` exactly, None when none does."""
    by_base: dict[str, list[int]] = {}
    for source in label.sources:
        by_base.setdefault(source.base, []).append(source.value)
    for base in sorted(by_base, key=lambda b: (b not in REQUEST_BASES, b)):
        if size in by_base[base]:
            return Dim(size, Label.of(base, size))
    for base, values in sorted(by_base.items()):
        for count in range(2, min(len(values), 4) + 1):
            for factors in combinations(sorted(values), count):
                if math.prod(factors) == size:
                    return Dim(size, Label(frozenset(Source(base, f) for f in factors)))
    return None


def _product(size: int, label: Label) -> Dim | None:
    """The part of `label` that is the product of two or three factors of any bases."""
    for count in (2, 3):
        for factors in combinations(sorted(label.sources), count):
            if math.prod(factor.value for factor in factors) == size:
                return Dim(size, Label(frozenset(factors)))
    return None


def view(shape: Shape, sizes: Sequence[int], given: Sequence[Dim] | None = None) -> Shape:
    """Labels of a view or reshape of `shape` to `sizes` (no -1 left in them).

    `given` has the labels that the caller's own integers carried, where it
    gave any. Both shapes are cut into the shortest runs of equal product; each run is
    merged into one dimension and split again. Raises ValueError when the
    element counts differ.
    """
    if math.prod(d.size for d in shape) != math.prod(sizes):
        raise ValueError(f"{[d.size for d in shape]} cannot be viewed as {list(sizes)}")
    if any(size == 0 for size in sizes) or any(d.size == 0 for d in shape):
        known = {d.size: d for d in shape if d.size}
        return tuple(known.get(size, Dim(size)) for size in sizes)
    result: list[Dim] = []
    old, new = list(shape), list(sizes)
    while old or new:
        taken, parts = _run(old, new)
        if len(taken) == 1 and len(parts) == 1:
            result.append(taken[0])
        elif not taken:  # ones appended at the end
            result += [Dim(size) for size in parts]
        else:
            hints = given[len(result) : len(result) + len(parts)] if given else None
            result += split(merge(taken, math.prod(parts)), parts, hints)
    return tuple(result)


def _run(old: list[Dim], new: list[int]) -> tuple[list[Dim], list[int]]:
    """Take the shortest leading runs of equal product from both lists."""
    if not old:
        given, new[:] = list(new), []
        return [], given
    taken, given = [old.pop(0)], []
    product, target = taken[0].size, 1
    while product != target or not given:
        if target < product or not given:
            if not new:
                break
            given.append(new.pop(0))
            target *= given[-1]
        else:
            taken.append(old.pop(0))
            product *= taken[-1].size
    # A trailing 1 on either side belongs to nothing: leave it to the next run
    # unless nothing else follows.
    while not new and old and all(d.size == 1 for d in old):
        taken.append(old.pop(0))
    return taken, given


def labels_by_value(sources: Iterable[Source]) -> dict[int, Label]:
    """Registry: the label of every value that has one origin.

    A value that is both the model's and the engine's is the model's; one that
    the request shares with anything else is ambiguous and left out.
    """
    precedence = (MODEL_CONFIG, ENGINE, LITERAL)
    registry: dict[int, Label] = {}
    for value, bases in _bases_by_value(sources).items():
        if len(bases) == 1:
            registry[value] = Label.of(next(iter(bases)), value)
        elif not bases & REQUEST_BASES:
            base = next(base for base in precedence if base in bases)
            registry[value] = Label.of(base, value)
    return registry


def conflicts(sources: Iterable[Source]) -> dict[int, set[str]]:
    """Values of the request that something else has too: the traced sizes collide."""
    return {
        value: bases
        for value, bases in _bases_by_value(sources).items()
        if bases & REQUEST_BASES and bases - REQUEST_BASES
    }


def _bases_by_value(sources: Iterable[Source]) -> dict[int, set[str]]:
    bases: dict[int, set[str]] = {}
    for source in sources:
        bases.setdefault(source.value, set()).add(source.base)
    return bases
