"""What a table covers: Vidur's rounding rules, and ranges taken from what was measured.

Vidur never looks between its grid points. Tokens of a step are rounded up to
8, lengths of the KV cache up to a granularity; a prefill chunk up to 32 in the
PyPI release, and not at all in the repository, whose random forest then takes
the nearest row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from dooly_backend.errors import InputError
from dooly_backend.workload import Batch

from .costs import StepCosts

logger = logging.getLogger(__name__)

Layout = Literal["repo", "pypi"]
LAYOUTS: tuple[Layout, ...] = ("repo", "pypi")

TOKEN_STEP = 8
CHUNK_STEP = 32
#: Vidur predicts every cell in advance; with more it takes minutes, not seconds.
MAX_CELLS = {"repo": 2_200_000, "pypi": 600_000}
#: So does training on more rows of attention.csv than this.
MAX_ROWS = 72_000
#: Where nobody says otherwise: finer ones change decode steps by less than their noise.
SMALLEST_GRANULARITY = 8
SPARSEST = 8
#: Vidur counts the token that a prefill yields as processed, and the PyPI
#: release looks KV lengths up as they are after the step.
DECODE_LEAD: Mapping[Layout, int] = {"repo": 1, "pypi": 2}
#: Where nothing measured says otherwise.
LARGEST_CHUNK, LARGEST_BATCH, LARGEST_LENGTH = 8192, 256, 32768


@dataclass(frozen=True)
class Ranges:
    """What the tables cover and Vidur may look up.

    `max_length` is a request's tokens when it ends, `max_chunk` the new tokens
    of one step, `max_batch` its requests, `granularity` the step of KV lengths.
    Rows of attention lie farther apart than Vidur's steps where a step is less
    than 1/`density` of the length: the forest answers with the nearest row.
    """

    max_length: int
    max_chunk: int
    max_batch: int
    granularity: int
    density: int = 64

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of one step, a multiple of 8."""
        return round_up(max(self.max_chunk, self.max_batch), TOKEN_STEP)

    @property
    def prediction_max_tokens(self) -> int:
        """Vidur's one limit on the tokens of a step and on KV lengths."""
        return round_up(max(self.max_length, self.max_tokens), self.granularity)

    def token_counts(self) -> list[int]:
        """Rows of mlp.csv. Only the multiples of 8 are looked up; 1 to 7 are for readers."""
        return [*range(1, TOKEN_STEP), *range(TOKEN_STEP, self.max_tokens + 1, TOKEN_STEP)]

    def chunks(self, layout: Layout) -> list[int]:
        """Prefill chunks of attention.csv; the repository also looks up small ones."""
        small = range(TOKEN_STEP, CHUNK_STEP, TOKEN_STEP) if layout == "repo" else ()
        return [*small, *growing(CHUNK_STEP, self.max_chunk, CHUNK_STEP, self.density)]

    def lengths(self) -> list[int]:
        """KV lengths of attention.csv above 0, up to the rounded longest."""
        last = round_up(self.max_length, self.granularity)
        return growing(self.granularity, last, self.granularity, self.density)

    def prefills(self, layout: Layout) -> list[tuple[int, int, int]]:
        """(chunk, KV length as Vidur labels it, tokens cached before the chunk).

        The repository labels a chunk with what is cached before it, the PyPI
        release with what is cached after it (rounded up, so that every first
        chunk has the label of its own length).
        """
        lengths = self.lengths()
        cells = []
        for chunk in self.chunks(layout):
            if layout == "repo":
                labels = [0, *(n for n in lengths if n <= self.max_length - chunk)]
                cells += [(chunk, label, label) for label in labels]
                continue
            # A cell's shortest chunk is 31 shorter; alone it may have a smaller label.
            first = round_up(max(1, chunk - CHUNK_STEP + 1), self.granularity)
            own = round_up(chunk, self.granularity)
            cells += [(chunk, label, 0) for label in range(first, own + 1, self.granularity)]
            # The last label may lie beyond the longest request.
            later = [(n, min(n, self.max_length) - chunk) for n in lengths if n > own]
            cells += [(chunk, label, history) for label, history in later]
        return cells

    def decodes(self, layout: Layout) -> list[tuple[int, int, int]]:
        """(batch size, KV length as Vidur labels it, tokens cached before the step)."""
        longest = self.max_length - 1  # the new token needs its place
        places = [
            (label, decode_context(label, self.granularity, layout, longest))
            for label in self.lengths()
        ]
        return [(size, *place) for size in range(1, self.max_batch + 1) for place in places]


def decode_context(label: int, granularity: int, layout: Layout, longest: int) -> int:
    """Tokens cached before the decode whose time stands for a KV length.

    Vidur rounds up to `label` all lengths that a growing request passes one by
    one: the row is taken in their middle.
    """
    last = min(longest, label - DECODE_LEAD[layout])
    first = max(1, label - DECODE_LEAD[layout] - granularity + 1)
    return max(1, (first + last) // 2)


def growing(first: int, last: int, step: int, density: int) -> list[int]:
    """Multiples of `step` from `first` to `last`, at least 1/`density` of themselves apart."""
    values = []
    value = first
    while value < last:
        values.append(value)
        # Powers of two keep multiples of larger ones among the values.
        value += max(step, 1 << ((value // density).bit_length() - 1) if value >= density else 0)
    return [*values, last]


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class Limits(Protocol):
    """What a user may set of the ranges; None: take what was measured."""

    @property
    def max_length(self) -> int | None: ...
    @property
    def max_chunk(self) -> int | None: ...
    @property
    def max_batch(self) -> int | None: ...
    @property
    def granularity(self) -> int | None: ...


def choose_ranges(costs: StepCosts, limits: Limits, layout: Layout) -> Ranges:
    """The ranges that `limits` give, else those that were measured.

    Raises InputError where they contradict each other or the model.
    """
    limit = costs.max_model_len or LARGEST_LENGTH
    chunk = _chosen(
        "max_chunk", limits.max_chunk, _measured_chunk(costs, min(limit, LARGEST_CHUNK))
    )
    batch = _chosen("max_batch", limits.max_batch, _measured_batch(costs, LARGEST_BATCH))
    length = _chosen("max_length", limits.max_length, _measured_length(costs, limit))
    if length > limit:
        raise InputError(f"max_length {length} is beyond the model's {limit} tokens")
    if chunk < CHUNK_STEP or length < CHUNK_STEP:
        raise InputError(f"max_chunk and max_length must be {CHUNK_STEP} or more")
    length = max(length, min(chunk, limit))
    chunk = min(chunk, length) // CHUNK_STEP * CHUNK_STEP
    granularity = limits.granularity or _granularity(length, chunk, batch, layout)
    return _thinned(Ranges(length, chunk, batch, granularity), layout)


def _chosen(name: str, given: int | None, measured: int) -> int:
    if given is None:
        return measured
    if given > measured:
        logger.warning(
            "%s %d is beyond what was measured (%d): times there go on as the last measured ones",
            name,
            given,
            measured,
        )
    return given


def _granularity(length: int, chunk: int, batch: int, layout: Layout) -> int:
    """The finest power of two with which Vidur stays quick."""
    chunks = chunk if layout == "repo" else chunk // CHUNK_STEP
    granularity = SMALLEST_GRANULARITY
    while length // granularity * (batch + chunks) > MAX_CELLS[layout] and granularity < length:
        granularity *= 2
    return granularity


def _thinned(ranges: Ranges, layout: Layout) -> Ranges:
    """With rows as dense as their number allows."""
    while ranges.density > SPARSEST and (
        len(ranges.decodes(layout)) + len(ranges.prefills(layout)) > MAX_ROWS
    ):
        ranges = replace(ranges, density=ranges.density // 2)
    return ranges


def _measured_chunk(costs: StepCosts, limit: int) -> int:
    limit = min(limit, costs.engine_limit("max_num_batched_tokens") or limit)
    steps = limit // CHUNK_STEP
    return CHUNK_STEP * _largest(
        steps, lambda n: costs.is_measured(Batch.prefill(n * CHUNK_STEP)), fallback=steps
    )


def _measured_length(costs: StepCosts, limit: int) -> int:
    steps = limit // CHUNK_STEP
    return CHUNK_STEP * _largest(
        steps, lambda n: costs.is_measured(Batch.decode(1, n * CHUNK_STEP - 1)), fallback=steps
    )


def _measured_batch(costs: StepCosts, limit: int) -> int:
    limit = min(limit, costs.engine_limit("max_num_seqs") or limit)

    def is_measured(size: int) -> bool:
        # Short contexts may lie below what was measured, long ones above it.
        return any(costs.is_measured(Batch.decode(size, 2**power)) for power in range(4, 12))

    return _largest(limit, is_measured, fallback=1)


def _largest(limit: int, holds: Callable[[int], bool], fallback: int) -> int:
    """The largest n from 1 to `limit` that holds, if all from some n to it do.

    `fallback` where none is found among `limit` and the powers of two below it.
    """
    limit = max(1, limit)
    if holds(limit):
        return limit
    powers = [2**exponent for exponent in range(limit.bit_length()) if 2**exponent < limit]
    low = next((power for power in reversed(powers) if holds(power)), None)
    if low is None:
        return max(1, fallback)
    high = min(2 * low, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
