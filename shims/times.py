"""Times of a latency model's occurrences, and the points at which they were measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from dooly_backend.database.records import Occurrence
from dooly_backend.regression.baseline import RoutingLatency
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.regression.whole_steps import OVER_TOKENS, is_whole
from dooly_backend.workload import Batch, PointKind

MEASURED, INTERPOLATED, EXTRAPOLATED = "measured", "interpolated", "extrapolated"
_Group = tuple[PointKind, bool]  # what its times depend on, and whether a step takes all of them
_SOURCES = (MEASURED, INTERPOLATED, EXTRAPOLATED)  # worse ones later


@dataclass(frozen=True)
class Cell:
    """A median time in microseconds; `source` is what its worst part rests on."""

    us: float = 0.0
    source: str = MEASURED

    def __add__(self, other: Cell) -> Cell:
        return Cell(self.us + other.us, max(self.source, other.source, key=_SOURCES.index))

    def times(self, factor: float) -> Cell:
        return Cell(self.us * factor, self.source)

    def moved(self, constant: float) -> Cell:
        """With `constant` microseconds more."""
        return Cell(self.us + constant, self.source)


ZERO = Cell()


def total(cells: Iterable[Cell]) -> Cell:
    return sum(cells, ZERO)


class CallTimes:
    """Times of the occurrences of `model`. Each is asked for once."""

    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self._cells: dict[tuple[str, object], Cell] = {}
        self._sums: dict[tuple[_Group, object], float] = {}
        self._groups: dict[_Group, list[Occurrence]] = defaultdict(list)
        for occurrence in model.occurrences:
            signature = occurrence.signature
            self._groups[signature.kind, is_whole(signature)].append(occurrence)

    def of(self, occurrence: Occurrence, batch: Batch) -> Cell:
        """All runs of `occurrence` in one step. Raises InputError where nothing was measured."""
        return self._call(occurrence, batch).times(occurrence.count)

    def _call(self, occurrence: Occurrence, batch: Batch) -> Cell:
        """One run of it."""
        key = (occurrence.signature.hash, what_matters(occurrence.signature.kind, batch))
        if key not in self._cells:
            latency = self.model.occurrence(occurrence, batch)
            self._cells[key] = _cell(latency.median_us, latency.measured, latency.extrapolated)
        return self._cells[key]

    def routed(self, occurrence: Occurrence, tokens: int, experts: int) -> Cell:
        """The same in a step of `tokens` where `experts` distinct ones fire.

        What does not depend on the routing takes what it does for as many tokens.
        """
        latency = self.model.signatures[occurrence.signature.hash]
        if not isinstance(latency, RoutingLatency):
            return self.of(occurrence, Batch.prefill(tokens))
        estimate, measured = latency.at_routing(tokens, experts)
        cell = _cell(estimate.statistics.median_us, measured, estimate.extrapolated)
        return cell.times(occurrence.count)

    def sum_of(self, occurrences: Iterable[Occurrence], batch: Batch) -> Cell:
        return total(self.of(occurrence, batch) for occurrence in occurrences)

    def step_us(self, batch: Batch) -> float:
        """One step of the whole model as the engine runs it: `LatencyModel.step_us`, kept."""
        shape = self.model.step_rules.of_batch(batch)
        return shape.time_us(*self.operations_us(batch, shape.tokens))

    def operations_us(self, batch: Batch, padded: int) -> tuple[float, float]:
        """All operations of a step of so many tokens with padding, and what of them is whole."""
        padding = Batch.prefill(padded)
        operations_us = whole_us = 0.0
        for group in self._groups:
            us = self._group_us(group, padding if group[0] in OVER_TOKENS else batch)
            operations_us += us
            whole_us += us if group[1] else 0.0
        return operations_us, whole_us

    def _group_us(self, group: _Group, batch: Batch) -> float:
        """All operations of a group: thousands of steps are asked for, many alike in this."""
        key = group, what_matters(group[0], batch)
        if key not in self._sums:
            occurrences = self._groups[group]
            self._sums[key] = sum(self._call(o, batch).us * o.count for o in occurrences)
        return self._sums[key]


def _cell(us: float, measured: bool, extrapolated: bool) -> Cell:
    return Cell(us, EXTRAPOLATED if extrapolated else MEASURED if measured else INTERPOLATED)


def what_matters(kind: PointKind, batch: Batch) -> object:
    """What of `batch` a time of this kind depends on, quick to hash."""
    if kind in ("tokens", "routing"):
        return batch.num_tokens
    if kind == "requests":
        return batch.num_reqs
    return batch.key if kind == "batch" else None


@dataclass(frozen=True)
class Axes:
    """Where a model was measured, rising, up to where all of it was.

    `chunks` and `histories` of single prefills, `sizes` and `contexts` of equal
    decodes; `others` are measured batches of any other kind; `experts` that fired.
    """

    tokens: tuple[int, ...]
    requests: tuple[int, ...]
    chunks: tuple[int, ...]
    histories: tuple[int, ...]
    sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    others: tuple[Batch, ...]
    experts: tuple[int, ...]

    @property
    def max_length(self) -> int:
        """Tokens of the longest request that was measured."""
        prefill = max(self.chunks, default=0) + max(self.histories, default=0)
        return max(prefill, max(self.contexts, default=0) + 1)


def axes_of(models: Iterable[LatencyModel]) -> Axes:
    """The measured points of all `models` together."""
    signatures = [
        [point for point in latency.points if point.kind != "constant"]
        for model in models
        for latency in model.signatures.values()
    ]
    batches = [[p.batch for p in points if p.batch is not None] for points in signatures]
    single = [[b for b in each if is_single_prefill(b)] for each in batches]
    equal = [[b for b in each if are_equal_decodes(b)] for each in batches]
    others = {
        batch.key: batch
        for each in batches
        for batch in each
        if not (is_single_prefill(batch) or are_equal_decodes(batch))
    }
    return Axes(
        tokens=_axis(
            [p.num_tokens for p in each if p.kind in ("tokens", "routing")] for each in signatures
        ),
        requests=_axis([p.num_reqs for p in each if p.kind == "requests"] for each in signatures),
        chunks=_axis([b.requests[0].query for b in each] for each in single),
        histories=_axis([b.requests[0].context for b in each] for each in single),
        sizes=_axis([b.num_reqs for b in each] for each in equal),
        contexts=_axis([b.requests[0].context for b in each] for each in equal),
        others=tuple(others[key] for key in sorted(others)),
        experts=_axis([p.num_experts for p in each] for each in signatures),
    )


def is_single_prefill(batch: Batch) -> bool:
    return batch.num_reqs == 1 and not batch.decodes


def are_equal_decodes(batch: Batch) -> bool:
    return not batch.prefills and len(set(batch.requests)) == 1


def _axis(places: Iterable[list[int | None]]) -> tuple[int, ...]:
    """All places up to the smallest of the ends."""
    known = [[place for place in each if place is not None] for each in places]
    known = [each for each in known if each]
    if not known:
        return ()
    end = min(map(max, known))
    return tuple(sorted({place for each in known for place in each if place <= end}))
