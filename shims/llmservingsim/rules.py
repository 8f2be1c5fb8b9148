"""What LLMServingSim makes of the tables for one step, by its own rules of looking up and adding.

This restates the simulator, not the exporter: it reads rows, and is what the
manifest's figures and the tests compare with the latency model. Times are
whole nanoseconds, as there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from dooly_backend.workload import Batch

from .architecture import Architecture
from .mapping import ATTENTION, MOE, PER_SEQUENCE, TP_STABLE
from .routing import Routing, expert_parallelism
from .tables import DegreeTables, Row

Line = tuple[list[int], list[int]]  # rising places, nanoseconds


class LLMServingSimRules:
    """Step times of a model of `layers` layers at one degree, without collectives."""

    def __init__(
        self,
        tables: Mapping[int, DegreeTables],
        architecture: Architecture,
        layers: int,
        degree: int,
    ) -> None:
        first = min(tables)
        stable = 1 if 1 in tables and architecture.known else degree
        mine, theirs = tables[degree], tables[stable]
        self._lines = _lines([*mine.dense, *mine.per_sequence])
        shared = _lines([*theirs.dense, *theirs.per_sequence])
        self._lines |= {name: shared[name] for name in TP_STABLE if name in shared}
        self._attention = _attention(mine.attention)
        self._moe = _moe(tables[first].moe)
        self._architecture = architecture
        self._layers = layers
        self._degree = degree

    def step_us(self, batch: Batch) -> float:
        """Raises KeyError for a layer that is missing: there the simulator would go on without."""
        parts = self._architecture.sequence
        block = ("pre_attn", "post_attn", "mlp_dense", "mlp_moe")
        once = self._sum(batch, [*parts["prologue"], *parts["head"]])
        each = self._sum(batch, [layer for part in block for layer in parts[part]])
        return (once + self._layers * each) / 1e3

    def _sum(self, batch: Batch, layers: Iterable[str]) -> int:
        return sum(self.layer_ns(layer, batch) for layer in layers)

    def layer_ns(self, layer: str, batch: Batch) -> int:
        """One call of `layer` in a step of `batch`, nanoseconds."""
        if layer == ATTENTION:
            return self._attention_ns(batch)
        if layer == MOE:
            return self.moe_ns(batch.num_tokens)
        number = batch.num_reqs if layer in PER_SEQUENCE else batch.num_tokens
        return max(1, int(_along(self._lines[layer], number)))

    def _attention_ns(self, batch: Batch) -> int:
        chunk = sum(request.query for request in batch.prefills)
        history = sum(request.context for request in batch.prefills)
        size = len(batch.decodes)
        context = sum(request.context for request in batch.decodes) // size if size else 0
        return self.attention_ns(chunk, history, size, context)

    def attention_ns(self, chunk: int, history: int, size: int, context: int) -> int:
        """Linear on each of the four axes, between slices of one chunk and size."""
        chunks = sorted({key[0] for key in self._attention})
        sizes = sorted({key[1] for key in self._attention})
        low_chunk, high_chunk, chunk_share = _bracket(chunks, chunk)
        low_size, high_size, size_share = _bracket(sizes, size)

        def corner(chunk: int, size: int) -> float:
            key = min(
                self._attention,
                key=lambda known: (known[0] - chunk) ** 2 + (known[1] - size) ** 2,
            )
            return _in_slice(self._attention[key], history, context)

        low = _between(corner(low_chunk, low_size), corner(low_chunk, high_size), size_share)
        high = _between(corner(high_chunk, low_size), corner(high_chunk, high_size), size_share)
        return max(1, int(_between(low, high, chunk_share)))

    def moe_ns(self, tokens: int) -> int:
        """The sparse block of one rank in a step of `tokens` tokens, routed evenly."""
        architecture = self._architecture
        routing = Routing(
            architecture.experts,
            min(architecture.experts_per_token, architecture.experts),
            expert_parallelism(architecture.experts, self._degree),
        )
        return _moe_ns(self._moe, routing, tokens)


def moe_lookup(rows: Iterable[Row]) -> Callable[[Routing, int], int]:
    """The simulator's look-up in rows of moe.csv: nanoseconds by routing and a step's tokens."""
    table = _moe(rows)
    return lambda routing, tokens: _moe_ns(table, routing, tokens)


def _moe_ns(table: Mapping[int, Line], routing: Routing, tokens: int) -> int:
    local = routing.tokens(tokens)
    if local == 0:
        return 0
    low, high, share = _bracket(sorted(table), routing.active(tokens))
    lower = _along(table[low], local)
    return max(1, int(_between(lower, _along(table[high], local), share)))


def _lines(rows: Iterable[Row]) -> dict[str, Line]:
    grouped: dict[str, dict[int, int]] = defaultdict(dict)
    for layer, place, us in rows:
        grouped[str(layer)][int(place)] = _ns(us)
    return {layer: _line(points) for layer, points in grouped.items()}


def _attention(rows: Iterable[Row]) -> dict[tuple[int, int], dict[int, Line]]:
    """Lines over the context by history, by (chunk, size)."""
    grouped: dict[tuple[int, int], dict[int, dict[int, int]]] = {}
    for chunk, history, size, context, us in rows:
        part = grouped.setdefault((int(chunk), int(size)), {})
        part.setdefault(int(history), {})[int(context)] = _ns(us)
    return {
        key: {history: _line(points) for history, points in part.items()}
        for key, part in grouped.items()
    }


def _moe(rows: Iterable[Row]) -> dict[int, Line]:
    grouped: dict[int, dict[int, int]] = defaultdict(dict)
    for tokens, active, us in rows:
        grouped[int(active)][int(tokens)] = _ns(us)
    return {active: _line(points) for active, points in grouped.items()}


def _line(points: Mapping[int, int]) -> Line:
    ordered = sorted(points.items())
    return [place for place, _ in ordered], [value for _, value in ordered]


def _ns(us: str | int | float) -> int:
    return max(1, round(float(us) * 1e3))


def _in_slice(part: Mapping[int, Line], history: int, context: int) -> float:
    low, high, share = _bracket(sorted(part), history)
    return _between(_along(part[low], context), _along(part[high], context), share)


def _along(line: Line, place: int) -> float:
    places, values = line
    low, high, share = _bracket(places, place)
    return _between(values[places.index(low)], values[places.index(high)], share)


def _bracket(places: Sequence[int], place: int) -> tuple[int, int, float]:
    """The places around `place` and how far between it lies; the last two for one beyond."""
    if len(places) == 1 or place <= places[0]:
        return places[0], places[0], 0.0
    index = min(bisect_right(places, place), len(places) - 1)
    low, high = places[index - 1], places[index]
    return low, high, (place - low) / (high - low)


def _between(low: float, high: float, share: float) -> float:
    return low + share * (high - low)
