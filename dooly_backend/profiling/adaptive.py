"""Where to measure next: the points that tell most about what is predicted worst.

All of it follows from what the database holds: the points of a signature in the
order in which they were measured. So a run that was killed goes on, another
model that runs the signature knows when nothing is left to do, and a wider
range needs only the rest.

A family of points starts with few that span its range. After that a point lies
in the middle of the gap that promises most: where the line across the gap and
the lines that continue its neighbours disagree, times the share of the range
that the gap is. At a jump (another tile, another kernel) they go on to disagree
in ever smaller gaps, so that it is closed in by halves. Every point is
predicted before it is measured; a family is done when the last of these errors
are small enough on average.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from dooly_backend.config import AdaptiveSweep
from dooly_backend.database.records import Signature
from dooly_backend.engines import Engine
from dooly_backend.profiling.evidence import SHORTEST_US, Evidence
from dooly_backend.profiling.families import (
    Family,
    Place,
    Plane,
    Scatter,
    families,
)
from dooly_backend.profiling.ranges import Range
from dooly_backend.profiling.sweep import fits
from dooly_backend.workload import Batch, WorkloadPoint

#: Depths of a size that is new to a plane: its ends and one between.
FIRST_DEPTHS = 3
#: Uncertainty where all predictions agree: the widest gaps are checked first.
SMALLEST = 1e-6
#: New sizes of a plane that must have been predicted well, not only new depths of known ones.
NEW_SIZES = 2
#: Scattered batches are checks of how batches combine: fewer of them are allowed.
SCATTERED_SHARE = 2


@dataclass(frozen=True)
class Candidate:
    """Points that belong together, and what measuring one of them promises."""

    points: tuple[WorkloadPoint, ...]
    score: float  # share of the use times relative uncertainty


@dataclass(frozen=True)
class Need:
    """What a family still needs: `candidates` for now, `at_most` points until it is done."""

    family: str
    candidates: tuple[Candidate, ...]
    at_most: int

    @property
    def urgent(self) -> bool:
        """Whether the candidates are where a family starts: all of them are measured."""
        return any(candidate.score == float("inf") for candidate in self.candidates)


def needs(evidence: Evidence, sweep: AdaptiveSweep) -> list[Need]:
    """The families of a signature that are not done, with what to measure next.

    Empty when the signature is known over the ranges of `sweep`.
    """
    found: list[Need] = []
    for family in families(evidence.signature, sweep, evidence.engine):
        if isinstance(family, Scatter) and any(need.urgent for need in found):
            continue  # what scattered batches are predicted from comes first
        need = _need(evidence, family, sweep)
        if need is not None:
            found.append(need)
    return found


def most_points(signature: Signature, sweep: AdaptiveSweep, engine: Engine) -> int:
    """Points of `signature` that `sweep` measures at most, where nothing is known."""
    nothing = Evidence(signature, (), frozenset(), engine)
    # Scattered batches too, which `needs` puts off until the planes have begun.
    found = [_need(nothing, family, sweep) for family in families(signature, sweep, engine)]
    return sum(need.at_most for need in found if need is not None)


@dataclass(frozen=True)
class HeldOutError:
    """How far a point was from what was predicted before it was measured, relative to it.

    The first points of a new size are chosen together: they count as one, by their mean.
    """

    error: float
    new_size: bool


def held_out_errors(evidence: Evidence, family: Family) -> list[HeldOutError]:
    """Errors of the points of a family, newest first.

    None is from before the measured range last grew: a point outside of what was
    measured is not predicted but continued.
    """
    errors: list[tuple[int | None, float]] = []
    for index in reversed(range(len(evidence.measurements))):
        point = evidence.measurements[index].point
        if not family.owns(point):
            continue
        line, without = None, frozenset[str]()
        if isinstance(family, Plane):
            earlier = [m.point for m in evidence.measurements[:index] if family.owns(m.point)]
            if not family.encloses(earlier, point):
                break
            line, without = _begun_line(family, point, earlier)
        error = evidence.error(index, without)
        if error is not None:
            errors.append((line, error))
    groups = groupby(enumerate(errors), key=lambda item: (item[1][0], item[1][0] or -item[0]))
    return [
        HeldOutError(statistics.fmean(error for _, (_, error) in group), key[0] is not None)
        for key, group in groups
    ]


def _need(evidence: Evidence, family: Family, sweep: AdaptiveSweep) -> Need | None:
    count = sum(1 for m in evidence.measurements if family.owns(m.point))
    if isinstance(family, Plane):
        most = sweep.points
        starting = tuple(_starting(evidence, family))
        if starting:
            return Need(family.name, starting, max(most - count, _number(starting)))
        inside = sum(1 for p in _places(family, evidence) if family.holds(p))
    else:
        most, inside = max(sweep.held_out, sweep.points // SCATTERED_SHARE), count
    if inside >= most:
        return None
    errors = held_out_errors(evidence, family)
    is_met = _are_small(errors, sweep.held_out, sweep.target)
    candidates: list[Candidate] = []
    if not isinstance(family, Plane):
        candidates += [] if is_met else _next_scattered(evidence, family.batch)
    elif not is_met:
        candidates += [*_new_depths(evidence, family), *_new_sizes(evidence, family)]
    elif not family.is_curve:
        # Depths of known sizes, well predicted from one another, say nothing of other sizes.
        sizes = [error for error in errors if error.new_size]
        if not _are_small(sizes, NEW_SIZES, sweep.target):
            candidates += _new_sizes(evidence, family)
    ordered = sorted(candidates, key=lambda candidate: -candidate.score)
    return Need(family.name, tuple(ordered), most - inside) if ordered else None


def _are_small(errors: Sequence[HeldOutError], count: int, target: float) -> bool:
    """Whether the mean of the newest `count` meets the target; not while there are fewer."""
    newest = [each.error for each in errors[:count]]
    return len(newest) == count and statistics.fmean(newest) <= target


# -- planes ---------------------------------------------------------------------


def _starting(evidence: Evidence, plane: Plane) -> Iterator[Candidate]:
    """Where the range begins: few sizes, few depths for each, as far as they are not settled."""
    settled: dict[int, list[int]] = {}
    for key in evidence.settled:
        place = plane.place(WorkloadPoint.parse(key))
        if place is not None:
            settled.setdefault(place[0], []).append(place[1])
    standing = plane.sizes.standing(list(settled))
    wanted = {rung: plane.depths(rung).rungs() for rung, size in standing.items() if size is None}
    for size, depths in settled.items():
        across = plane.depths(size)
        is_alone = len(depths) == 1 and across.high > across.low
        if plane.sizes.low <= size <= plane.sizes.high and (size in standing.values() or is_alone):
            wanted[size] = across.uncovered(depths)
    for size, depths in sorted(wanted.items()):
        points = tuple(plane.point((size, depth)) for depth in _ends_first(depths))
        if points:
            yield Candidate(points, float("inf"))


def _new_depths(evidence: Evidence, plane: Plane) -> Iterator[Candidate]:
    """The middle of every gap along each size's depths."""
    lines = _lines(plane, evidence)
    for size, depths in lines.items():
        across = plane.depths(size)
        along = {depth: _now(evidence, plane, (size, depth)) for depth in depths}
        for low, high in pairwise(depths):
            middle = across.between(low, high)
            if middle is not None and plane.holds((size, middle)):
                weight = _line_share(size, list(lines), plane.sizes) * across.share(low, high)
                score = weight * disagreement(along, low, high, middle)
                yield from _unsettled(evidence, [plane.point((size, middle))], score)


def _new_sizes(evidence: Evidence, plane: Plane) -> Iterator[Candidate]:
    """The middle of every gap between sizes, at a few depths."""
    sizes = list(_lines(plane, evidence))
    for low, high in pairwise(sizes):
        middle = plane.sizes.between(low, high)
        if middle is None or not plane.sizes.low <= middle <= plane.sizes.high:
            continue
        chosen = _few(plane.depths(middle).rungs())
        score = plane.sizes.share(low, high) * statistics.fmean(
            disagreement(
                {size: _now(evidence, plane, (size, depth)) for size in sizes}, low, high, middle
            )
            for depth in chosen
        )
        targets = [plane.point((middle, depth)) for depth in chosen]
        yield from _unsettled(evidence, targets, score / len(targets))


def _lines(plane: Plane, evidence: Evidence) -> dict[int, list[int]]:
    """The measured depths by size, both rising."""
    lines: dict[int, list[int]] = {}
    for size, depth in sorted(_places(plane, evidence)):
        lines.setdefault(size, []).append(depth)
    return lines


def _now(evidence: Evidence, plane: Plane, place: Place) -> float:
    return evidence.now(plane.point(place)) or 0.0


def disagreement(times: Mapping[int, float], low: int, high: int, middle: int) -> float:
    """How far the prediction at `middle` may be off, relative to it.

    `times` are known at places along a line, `low` and `high` are neighbours
    among them. Their straight line is compared with the lines through the two
    places before `low` and behind `high`, which are taken to leave neither the
    gap's range of times; where there are none, with a power law.
    """
    places = sorted(times)
    before, behind = places.index(low), places.index(high)
    straight = _line(times, low, high, middle)
    others = []
    if before > 0:
        others.append(_line(times, places[before - 1], low, middle))
    if behind + 1 < len(places):
        others.append(_line(times, high, places[behind + 1], middle))
    least, most = sorted((times[low], times[high]))
    if not others:
        others.append(math.sqrt(max(least, 0.0) * most))
    far = max(abs(min(max(other, least), most) - straight) for other in others)
    return max(far / max(straight, SHORTEST_US), SMALLEST)


def _line(times: Mapping[int, float], first: int, second: int, place: int) -> float:
    """The line through two places, at a third."""
    slope = (times[second] - times[first]) / (second - first)
    return times[first] + slope * (place - first)


def _unsettled(
    evidence: Evidence, points: Sequence[WorkloadPoint], score: float
) -> Iterator[Candidate]:
    left = tuple(point for point in points if point.key not in evidence.settled)
    if left:
        yield Candidate(left, score)


def _places(plane: Plane, evidence: Evidence) -> set[Place]:
    """Where on `plane` something is measured."""
    places = (plane.place(m.point) for m in evidence.measurements)
    return {place for place in places if place is not None}


def _begun_line(
    plane: Plane, point: WorkloadPoint, earlier: Sequence[WorkloadPoint]
) -> tuple[int | None, frozenset[str]]:
    """The size of `point` and its earlier points, where it is one of the first of that size."""
    place = plane.place(point)
    assert place is not None
    same = [other for other in earlier if (plane.place(other) or (0,))[0] == place[0]]
    is_first = len(same) < FIRST_DEPTHS and plane.depths(place[0]).high > 0
    return (place[0], frozenset(p.key for p in same)) if is_first else (None, frozenset())


def _line_share(size: int, sizes: Sequence[int], axis: Range) -> float:
    """How much of the use lies nearer to `size` than to other sizes."""
    if axis.high <= axis.low:
        return 1.0
    index = sizes.index(size)
    below = axis.share(sizes[index - 1], size) if index else 0.0
    above = axis.share(size, sizes[index + 1]) if index + 1 < len(sizes) else 0.0
    return (below + above) / 2


def _few(values: Sequence[int]) -> list[int]:
    """Both ends, and the one in the middle of what lies between them."""
    inner = values[1:-1]
    return _ends_first([values[0], *inner[len(inner) // 2 : len(inner) // 2 + 1], values[-1]])


def _ends_first(values: Sequence[int]) -> list[int]:
    """Both ends ahead of what lies between them, which they then predict."""
    return [*dict.fromkeys((values[0], values[-1])), *values[1:-1]] if values else []


# -- scattered batches -----------------------------------------------------------


def _next_scattered(evidence: Evidence, batch: Callable[[int], Batch]) -> Iterator[Candidate]:
    """The next two of the sequence that are not settled and that the engine takes."""
    found = 0
    for index in range(64):
        made = batch(index)
        point = WorkloadPoint.of("batch", made)
        if point.key not in evidence.settled and fits(made, evidence.engine):
            yield Candidate((point,), 1.0 / (index + 1))
            found += 1
        if found == 2:
            return


def _number(candidates: Iterable[Candidate]) -> int:
    return sum(len(candidate.points) for candidate in candidates)
