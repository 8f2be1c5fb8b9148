"""Step times of one latency model, sorted into the parts that Vidur tells apart.

A step costs ``T(tokens) + attention(batch) + g(requests)``: operations over
tokens, attention, and what depends on the number of requests or on nothing
(logits, sampler, the step's own cost). All times here are milliseconds of the
whole model on one tensor-parallel rank.

Where whole steps were measured, a step is no such sum: it is padded and fused by its execution
mode, and not shorter than its launch. T and g are then those of decode steps of as many tokens and
requests. `StepCosts.waiting` says what launching takes longer, `step_ms` what a step takes in all;
tables.py shares that out.
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
from dooly_backend.regression.whole_steps import StepRules, StepShape
from dooly_backend.simulation.execution import Mode
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
        self._padded: dict[int, tuple[float, float]] = {}

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

    def operation(self, op: str, count: int) -> Cell:
        """One operation over `count` tokens, as a decode step of as many runs it."""
        shape = self.of_decodes(count)
        cell = self.home(op, Batch.prefill(shape.tokens))
        return cell if op == ALL_REDUCE else cell.times(shape.share)

    def waiting(self, count: int) -> float:
        """What launching a prefill of `count` tokens takes longer than T and g(1)."""
        launch = self.rules.of(count, 1, count).launch_us / 1e3
        return max(0.0, launch - self.tokens(count).median - self.requests(1).median)

    def tokens(self, count: int) -> Cell:
        """T: every operation that depends on the number of tokens."""
        if count not in self._tokens:
            self._tokens[count] = total(self.operation(op, count) for op in (*MLP_OPS, ALL_REDUCE))
        return self._tokens[count]

    def attention(self, batch: Batch) -> Cell:
        return self.home(ATTENTION, batch)

    def requests(self, count: int) -> Cell:
        """g: logits, sampler and the step's own cost."""
        if count not in self._requests:
            shape = self.of_decodes(count)
            cell = self.home(STEP, Batch.decode(count, 1)).times(shape.share)
            self._requests[count] = cell.moved(shape.own_us / 1e3)
        return self._requests[count]

    def modes(self, count: int) -> tuple[Mode, Mode]:
        """How a prefill of `count` tokens runs, and how a step of as many decodes."""
        return self.rules.of(count, 1, count).mode, self.of_decodes(count).mode

    @property
    def rules(self) -> StepRules:
        return self.model.step_rules

    def of_decodes(self, count: int) -> StepShape:
        """How a step of `count` decodes runs."""
        return self.rules.of(count, count, 1)

    @cached_property
    def one_request(self) -> float:
        """What one request more costs beside attention, in the mean of the first few: median."""
        more = self.requests(FEW_REQUESTS).median - self.requests(1).median
        return max(0.0, more / (FEW_REQUESTS - 1))

    def step_ms(self, batch: Batch) -> float:
        """One of many equal steps, in all (`LatencyModel.step_us`)."""
        shape = self.rules.of_batch(batch)
        fused, collectives = self._over_tokens(shape.tokens)
        fused += self.home(STEP, batch).median
        whole = collectives + self.attention(batch).median
        return shape.time_us((fused + whole) * 1e3, whole * 1e3) / 1e3

    def _over_tokens(self, padded: int) -> tuple[float, float]:
        """Medians of all operations over tokens, and of collectives."""
        if padded not in self._padded:
            batch = Batch.prefill(padded)
            fused = sum(self.home(op, batch).median for op in MLP_OPS)
            self._padded[padded] = fused, self.home(ALL_REDUCE, batch).median
        return self._padded[padded]

    def is_measured(self, batch: Batch) -> bool:
        """Whether every operation's time at `batch` lies in the profiled range."""
        return all(
            self.occurrence(a.occurrence, batch).source != EXTRAPOLATED for a in self.assignments
        )
