"""The rows of the tables: LLMServingSim's own grids and the measured points.

The simulator interpolates linearly on every axis, and so does the latency
model between its measured points: with these on the grid the two are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..times import Axes
from .options import LLMServingSimOptions

#: Where nothing was measured that says how far a table goes.
_TOKENS, _SEQUENCES, _LENGTH = 2048, 256, 2048
#: First steps of the attention axes of the simulator's own profiler.
FIRST_CHUNK, FIRST_SIZE, FIRST_LENGTH = 16, 1, 16
#: The shortest prefill: one new token is a decode, in the simulator and here.
SHORTEST_CHUNK = 2


@dataclass(frozen=True)
class AttentionGrid:
    """Rising places of attention.csv.

    Pure prefills are (chunks x histories), pure decodes (sizes x contexts).
    Rows of both have every pair of a chunk and a size, so that the simulator
    never falls to a neighbour; of their histories and contexts `mixed_*`.
    """

    chunks: tuple[int, ...]
    histories: tuple[int, ...]
    sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    mixed_histories: tuple[int, ...]
    mixed_contexts: tuple[int, ...]

    @property
    def rows(self) -> int:
        chunks, sizes = len(self.chunks), len(self.sizes)
        mixed = chunks * sizes * len(self.mixed_histories) * len(self.mixed_contexts)
        return chunks * len(self.histories) + sizes * len(self.contexts) + mixed


@dataclass(frozen=True)
class Grids:
    """Rising places of every table."""

    tokens: tuple[int, ...]
    sequences: tuple[int, ...]
    attention: AttentionGrid

    @property
    def max_tokens(self) -> int:
        return self.tokens[-1]

    @property
    def max_seqs(self) -> int:
        """Requests of one step that all tables cover."""
        return min(self.sequences[-1], self.attention.sizes[-1])

    @property
    def max_kv(self) -> int:
        return max(self.attention.histories[-1], self.attention.contexts[-1])


def choose_grids(axes: Axes, options: LLMServingSimOptions) -> Grids:
    """Up to where was measured, or less where `options` say so."""
    tokens = _capped(axes.tokens, options.max_tokens, _TOKENS)
    sequences = _capped(axes.requests, options.max_seqs, _SEQUENCES)
    chunks = _capped(axes.chunks, options.max_tokens, tokens[-1])
    histories = _capped(axes.histories, options.max_kv, 0)
    sizes = _capped(axes.sizes, options.max_seqs, sequences[-1])
    contexts = _capped(axes.contexts, options.max_kv, _LENGTH)
    measured = AttentionGrid(
        _union(chunks, [SHORTEST_CHUNK]),
        _union(histories, [0]),
        _union(sizes, [1]),
        contexts,
        _union(histories, [0]),
        contexts,
    )
    return Grids(
        tokens=_union(tokens, token_grid(tokens[-1])),
        sequences=_union(sequences, token_grid(sequences[-1])),
        attention=_thinned(measured, options.max_rows),
    )


def token_grid(last: int) -> list[int]:
    """Of the simulator's profiler: every number to 15, every 4th to 63, every 16th from 64."""
    steps = [*range(1, 16), *range(16, 64, 4), *range(64, last + 1, 16)]
    return [*(step for step in steps if step < last), last]


def doubling(last: int, first: int) -> list[int]:
    """`first` times the powers of two, to `last`, which is among them."""
    places = []
    while first < last:
        places.append(first)
        first *= 2
    return [*places, last] if last > 0 else places


def _thinned(measured: AttentionGrid, max_rows: int) -> AttentionGrid:
    """With the simulator's own grid where there is room, and as much else as there is room for.

    Places that were not measured lie on straight lines between those that
    were, so they are the first to go; then every other history and context of
    mixed rows, which changes what lies between them.
    """
    histories = _union(measured.histories, doubling(measured.histories[-1], FIRST_LENGTH))
    contexts = _union(measured.contexts, doubling(measured.contexts[-1], FIRST_LENGTH))
    full = AttentionGrid(
        _union(measured.chunks, doubling(measured.chunks[-1], FIRST_CHUNK)),
        histories,
        _union(measured.sizes, doubling(measured.sizes[-1], FIRST_SIZE)),
        contexts,
        histories,
        contexts,
    )
    grid = full
    if grid.rows > max_rows:
        grid = replace(
            full,
            mixed_histories=measured.mixed_histories,
            mixed_contexts=measured.mixed_contexts,
        )
    if grid.rows > max_rows:
        grid = measured
    while grid.rows > max_rows and len(grid.mixed_histories) + len(grid.mixed_contexts) > 4:
        grid = replace(
            grid,
            mixed_histories=_every_other(grid.mixed_histories),
            mixed_contexts=_every_other(grid.mixed_contexts),
        )
    return grid


def _every_other(places: tuple[int, ...]) -> tuple[int, ...]:
    """The first, the last, and half of those between."""
    return _union(places[::2], places[-1:])


def _capped(measured: tuple[int, ...], limit: int | None, unmeasured: int) -> tuple[int, ...]:
    """Measured places to `limit`, which is among them; `unmeasured` stands for none."""
    last = measured[-1] if measured else unmeasured
    if limit is not None:
        last = min(limit, last)
    return _union([place for place in measured if place <= last], [last])


def _union(*places: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set().union(*places)))
