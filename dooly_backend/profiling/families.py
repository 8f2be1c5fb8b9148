"""The families of points that a signature is measured at: planes and scattered batches.

A plane holds points with two numbers, a size and a depth: decodes have a batch
size and a context, prefills a chunk and a history, MoE layers tokens and
experts. Where only one number counts, the depth is 0. Batches that two numbers
do not describe (decodes of uneven length, mixed batches) are scattered: taken
one after the other from a sequence that fills the ranges evenly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dooly_backend.config import AdaptiveSweep
from dooly_backend.database.records import Signature
from dooly_backend.engines import Engine
from dooly_backend.profiling.ranges import Range
from dooly_backend.workload import Batch, Request, WorkloadPoint

Place = tuple[int, int]  # size, depth

#: Smallest prefill chunk and shortest context of a decode that points are placed at.
SHORTEST_CHUNK = 8
SHORTEST_CONTEXT = 16


@dataclass(frozen=True)
class Plane:
    """Points by size and depth. `depths` gives the depths that a size allows."""

    name: str
    sizes: Range
    depths: Callable[[int], Range]
    point: Callable[[Place], WorkloadPoint]
    place: Callable[[WorkloadPoint], Place | None]  # None: of another family

    @property
    def is_curve(self) -> bool:
        """Whether only the size counts."""
        return all(self.depths(size).high == 0 for size in (self.sizes.low, self.sizes.high))

    def owns(self, point: WorkloadPoint) -> bool:
        return self.place(point) is not None

    def holds(self, place: Place) -> bool:
        """Whether `place` lies in the wanted range."""
        size, depth = place
        depths = self.depths(size)
        return self.sizes.low <= size <= self.sizes.high and depths.low <= depth <= depths.high

    def encloses(self, known: Sequence[WorkloadPoint], point: WorkloadPoint) -> bool:
        """Whether `point` lies among those of `known` that are its own, by size and by depth."""
        place = self.place(point)
        places = [found for other in known if (found := self.place(other)) is not None]
        if place is None or not places:
            return False
        return all(
            min(found[axis] for found in places)
            <= place[axis]
            <= max(found[axis] for found in places)
            for axis in (0, 1)
        )


def all_planes(signature: Signature, longest: int) -> list[Plane]:
    """The planes of `signature` without bounds but a request's longest length."""
    most = 1 << 40
    if signature.kind == "batch":
        return [_prefills(most, most, longest), _decodes(most, most)]
    if signature.kind == "routing":
        routing = json.loads(signature.canonical)["routing"]
        return [_routing(most, int(routing["experts"]), int(routing["top_k"]))]
    return [_curve(signature.kind, most, lambda _: WorkloadPoint("constant"))]


@dataclass(frozen=True)
class Scatter:
    """A sequence of batches of one shape."""

    name: str
    batch: Callable[[int], Batch]
    owns: Callable[[WorkloadPoint], bool]


Family = Plane | Scatter


def families(signature: Signature, sweep: AdaptiveSweep, engine: Engine) -> list[Family]:
    """The families of `signature` within the ranges of `sweep` and the engine's limits."""
    longest = engine.max_request_len
    tokens = min(sweep.tokens, engine.max_num_tokens, longest * engine.max_num_reqs)
    requests = min(sweep.requests, engine.max_num_reqs)
    if signature.kind == "tokens":
        return [_curve("tokens", tokens, lambda n: WorkloadPoint("tokens", num_tokens=n))]
    if signature.kind == "requests":
        return [_curve("requests", requests, lambda n: WorkloadPoint("requests", num_reqs=n))]
    if signature.kind == "routing":
        routing = json.loads(signature.canonical)["routing"]
        return [_routing(tokens, int(routing["experts"]), int(routing["top_k"]))]
    if signature.kind == "batch":
        context = min(sweep.context, longest - 1)
        planes: list[Family] = [
            _prefills(tokens, context, longest),
            _decodes(requests, context),
        ]
        return planes + _scattered(tokens, requests, context, longest)
    return [_curve("constant", 1, lambda _: WorkloadPoint("constant"))]


def shape(batch: Batch) -> str:
    """What family a batch belongs to: "prefill", "decode", "uneven" or "mixed"."""
    if not batch.prefills:
        return "decode" if len(set(batch.requests)) == 1 else "uneven"
    return "prefill" if batch.num_reqs == 1 else "mixed"


def _curve(name: str, high: int, point: Callable[[int], WorkloadPoint]) -> Plane:
    def place(of: WorkloadPoint) -> Place:
        return of.num_tokens or of.num_reqs or 1, 0

    return Plane(name, Range(1, high), _no_depth, lambda place: point(place[0]), place)


def _no_depth(_: int) -> Range:
    return Range(0, 0)


def _routing(tokens: int, experts: int, top_k: int) -> Plane:
    """Every number of tokens from the fewest experts that can fire to the most."""

    def place(point: WorkloadPoint) -> Place | None:
        if point.num_tokens is None or point.num_experts is None:
            return None
        return point.num_tokens, point.num_experts

    return Plane(
        "routing",
        Range(1, tokens),
        lambda size: Range(top_k, min(experts, size * top_k)),
        lambda at: WorkloadPoint("routing", num_tokens=at[0], num_experts=at[1]),
        place,
    )


def _prefills(tokens: int, context: int, longest: int) -> Plane:
    most = min(tokens, longest)

    def place(point: WorkloadPoint) -> Place | None:
        batch = point.batch
        if batch is None or shape(batch) != "prefill":
            return None
        return batch.requests[0].query, batch.requests[0].context

    return Plane(
        "prefill",
        Range(min(SHORTEST_CHUNK, most), most),
        lambda chunk: Range(0, max(0, min(context, longest - chunk))),
        lambda at: WorkloadPoint.of("batch", Batch.prefill(*at)),
        place,
    )


def _decodes(requests: int, context: int) -> Plane:
    def place(point: WorkloadPoint) -> Place | None:
        batch = point.batch
        if batch is None or shape(batch) != "decode":
            return None
        return batch.num_reqs, batch.requests[0].context

    shortest = min(SHORTEST_CONTEXT, context)
    return Plane(
        "decode",
        Range(1, requests),
        lambda _: Range(shortest, context),
        lambda at: WorkloadPoint.of("batch", Batch.decode(*at)),
        place,
    )


def _scattered(tokens: int, requests: int, context: int, longest: int) -> list[Family]:
    """Decodes of uneven length, and batches with several prefills or with both kinds."""
    if requests < 2 or tokens < 2 * SHORTEST_CHUNK or context < 4 * SHORTEST_CONTEXT:
        return []

    def uneven(index: int) -> Batch:
        count = _spread(_halton(index, 2), 2, requests)
        mean = _spread(_halton(index, 3), 2 * SHORTEST_CONTEXT, context * 4 // 9)
        lengths = (mean // 4, mean // 2, mean, mean * 9 // 4)  # their mean is `mean`
        return Batch(tuple(Request(1, lengths[4 * i // count]) for i in range(count)))

    def mixed(index: int) -> Batch:
        if index % 3 == 2:
            count = _spread(_halton(index, 2), 2, min(8, requests, tokens // SHORTEST_CHUNK))
            most = min(longest, tokens // count)
            return Batch.prefill(_spread(_halton(index, 3), SHORTEST_CHUNK, most), count=count)
        decodes = _spread(_halton(index, 2), 1, min(requests - 1, tokens - SHORTEST_CHUNK))
        most = min(longest, tokens - decodes)
        chunk = _spread(_halton(index, 3), SHORTEST_CHUNK, most)
        history = min(context, longest - chunk) // 2 if index % 3 == 1 else 0
        depth = _spread(_halton(index, 5), SHORTEST_CONTEXT, context)
        return Batch.prefill(chunk, history) + Batch.decode(decodes, depth)

    return [_scatter("uneven", uneven), _scatter("mixed", mixed)]


def _scatter(name: str, batch: Callable[[int], Batch]) -> Scatter:
    def owns(point: WorkloadPoint) -> bool:
        return point.batch is not None and shape(point.batch) == name

    return Scatter(name, batch, owns)


def _spread(position: float, low: int, high: int) -> int:
    """The number at `position` (0 to 1) from `low` to `high`, by ratio."""
    high = max(low, high)
    return min(high, round(math.exp(math.log(low) + position * math.log(high / low))))


def _halton(index: int, base: int) -> float:
    """Element `index` of the sequence of van der Corput: fills 0 to 1 evenly, at every length."""
    value, share, index = 0.0, 1.0, index + 1
    while index:
        share /= base
        index, digit = divmod(index, base)
        value += digit * share
    return value
