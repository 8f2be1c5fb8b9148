"""Step times of one latency model, sorted into the parts that Vidur tells apart.

A step costs ``T(tokens) + attention(batch) + g(requests)``: operations over
tokens, attention, and what depends on the number of requests or on nothing
(logits, sampler, the step's own cost). All times here are milliseconds of the
whole model on one tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dooly_backend.database.records import Occurrence
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch

from ..times import EXTRAPOLATED, INTERPOLATED, MEASURED, what_matters
from .mapping import ALL_REDUCE, ATTENTION, MLP_OPS, STEP, Assignment, assign

#: Prefills share a step with few requests or many; one figure has to do for all.
FEW_REQUESTS = 8
_SOURCES = (MEASURED, INTERPOLATED, EXTRAPOLATED)  # worse ones later


@dataclass(frozen=True)
class Cell:
    """A time in milliseconds with its spread, and what it rests on.

    `source` is that of its worst part.
    """

    min: float = 0.0
    max: float = 0.0
    mean: float = 0.0
    median: float = 0.0
    std: float = 0.0
    source: str = MEASURED

    def __add__(self, other: Cell) -> Cell:
        """Of two independent operations, one after the other."""
        return Cell(
            self.min + other.min,
            self.max + other.max,
            self.mean + other.mean,
            self.median + other.median,
            math.hypot(self.std, other.std),
            max(self.source, other.source, key=_SOURCES.index),
        )

    def times(self, factor: float) -> Cell:
        """All five figures scaled: the same operation, run or shared out `factor` times."""
        return Cell(
            self.min * factor,
            self.max * factor,
            self.mean * factor,
            self.median * factor,
            self.std * factor,
            self.source,
        )

    def moved(self, constant: float) -> Cell:
        """With `constant` milliseconds more, which have no spread."""
        return replace(
            self,
            min=self.min + constant,
            max=self.max + constant,
            mean=self.mean + constant,
            median=self.median + constant,
        )


ZERO = Cell()


def total(cells: Iterable[Cell]) -> Cell:
    return sum(cells, ZERO)


class StepCosts:
    """`model` seen as Vidur's operations. Each latency is asked for once."""

    def __init__(self, model: LatencyModel) -> None:
        self.model = model
        self.assignments = assign(model.occurrences)
        self._homes: dict[str, list[Assignment]] = defaultdict(list)
        for assignment in self.assignments:
            self._homes[assignment.home].append(assignment)
        self._cells: dict[tuple[str, object], Cell] = {}
        self._tokens: dict[int, Cell] = {}
        self._requests: dict[int, Cell] = {}

    @property
    def layers(self) -> int:
        return self.model.configuration.num_layers

    @cached_property
    def max_model_len(self) -> int:
        """Tokens that a request may have; 0 where the engine did not say."""
        return self.engine_limit("max_model_len")

    def engine_limit(self, name: str) -> int:
        """A limit that the profiled engine had; 0 where it did not say."""
        value: Any = self.model.configuration.facts.get(name)
        return int(value) if value else 0

    def occurrence(self, occurrence: Occurrence, batch: Batch) -> Cell:
        """All runs of `occurrence` in one step."""
        key = (occurrence.signature.hash, what_matters(occurrence.signature.kind, batch))
        if key not in self._cells:
            latency = self.model.occurrence(occurrence, batch)
            source = MEASURED if latency.measured else INTERPOLATED
            if latency.extrapolated:
                source = EXTRAPOLATED
            self._cells[key] = Cell(
                latency.min_us / 1e3,
                latency.max_us / 1e3,
                latency.mean_us / 1e3,
                latency.median_us / 1e3,
                latency.std_us / 1e3,
                source,
            )
        return self._cells[key].times(occurrence.count)

    def home(self, home: str, batch: Batch) -> Cell:
        """Everything that is counted in `home`."""
        return total(self.occurrence(a.occurrence, batch) for a in self.of_home(home))

    def of_home(self, home: str) -> list[Assignment]:
        return self._homes.get(home, [])

    def shown(self, column: str, batch: Batch) -> Cell:
        """What a column that Vidur does not read shows besides."""
        shown = (a for a in self.assignments if a.shown == column)
        return total(self.occurrence(a.occurrence, batch) for a in shown)

    def tokens(self, count: int) -> Cell:
        """T: every operation that depends on the number of tokens."""
        if count not in self._tokens:
            batch = Batch.prefill(count)
            homes = (*MLP_OPS, ALL_REDUCE)
            self._tokens[count] = total(self.home(home, batch) for home in homes)
        return self._tokens[count]

    def attention(self, batch: Batch) -> Cell:
        return self.home(ATTENTION, batch)

    def requests(self, count: int) -> Cell:
        """g: logits, sampler and the step's own cost."""
        if count not in self._requests:
            step = self.model.step_cost
            constant = step.time_us(self.layers, count) / 1e3 if step else 0.0
            cell = self.home(STEP, Batch.decode(count, 1))
            self._requests[count] = cell.moved(constant)
        return self._requests[count]

    @cached_property
    def one_request(self) -> float:
        """What one request more costs beside attention, in the mean of the first few: median."""
        more = self.requests(FEW_REQUESTS).median - self.requests(1).median
        return max(0.0, more / (FEW_REQUESTS - 1))

    def step(self, batch: Batch) -> Cell:
        return total(
            (self.tokens(batch.num_tokens), self.attention(batch), self.requests(batch.num_reqs))
        )

    def is_measured(self, batch: Batch) -> bool:
        """Whether every operation's time at `batch` lies in the profiled range."""
        return all(
            self.occurrence(a.occurrence, batch).source != EXTRAPOLATED for a in self.assignments
        )
