"""What single batches took live, with its noise: from the files of `measure`.

The files of `integration.gpu.steps` and `integration.gpu.step_costs` are read, too. They have
one round: medians, and the quartiles of the steps in a row.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dooly_backend.workload import Batch
from integration.gpu.step_errors import Served
from integration.per_batch.inversions import Time

#: Steps launched before the one before them is out, or each alone on an idle engine.
How = Literal["in a row", "waited for"]
_QUARTILES_OF_NORMAL = 1.349  # between them, in standard deviations


@dataclass(frozen=True)
class Engine:
    """The engine that a batch ran on: a configuration, its depth and its limits."""

    served: Served
    layers: int
    max_num_seqs: int = 256  # what `integration.gpu.steps` takes
    max_num_batched_tokens: int = 8192

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Engine:
        limits = {n: row[n] for n in ("max_num_seqs", "max_num_batched_tokens") if n in row}
        return cls(Served.of(row), row["layers"], **limits)


@dataclass(frozen=True)
class Measured:
    """One batch on one engine."""

    engine: Engine
    batch: Batch
    how: How
    step_mode: str  # "" where it was not told
    rounds: int
    time: Time


@dataclass(frozen=True)
class _Round:
    """A batch in one round: the median, and the spread of single steps (standard deviation)."""

    us: float
    spread_us: float


def measured(rows: Iterable[Mapping[str, Any]]) -> list[Measured]:
    """Every batch, over its rounds: their mean, and its standard error.

    What rounds differ by is told by all batches of an engine that run in one mode together,
    as a share of the time; a batch whose own rounds differ by more has that. A batch
    with one round alone, on an engine on which none has two, has the spread of its steps.
    """
    found: dict[tuple[Engine, Batch, How, str], list[_Round]] = defaultdict(list)
    for row in rows:
        for how, each in _rounds(row):
            key = Engine.of(row), Batch.parse(row["batch"]), how, row.get("step_mode", "")
            found[key].append(each)
    alike: dict[Hashable, list[list[_Round]]] = defaultdict(list)
    for (engine, _, how, mode), rounds in found.items():
        alike[engine, how, mode].append(rounds)
    pooled = {key: _between(batches) for key, batches in alike.items()}
    result = []
    for (engine, batch, how, mode), rounds in found.items():
        us = statistics.fmean(each.us for each in rounds)
        share = max((s for s in (pooled[engine, how, mode], _between([rounds])) if s), default=None)
        if share is None:
            noise = max(each.spread_us for each in rounds)
        else:
            noise = us * share / math.sqrt(len(rounds))
        result.append(Measured(engine, batch, how, mode, len(rounds), Time(us, noise)))
    return result


def _rounds(row: Mapping[str, Any]) -> Iterable[tuple[How, _Round]]:
    """What one row tells."""
    interval = row["interval_us"]
    if isinstance(interval, list):
        yield "in a row", _of_samples(interval)
        if "waited_us" in row:
            yield "waited for", _of_samples(row["waited_us"])
        return
    # The steps that were waited for left no spread: that of those in a row stands for it.
    spread = (row["high_us"] - row["low_us"]) / _QUARTILES_OF_NORMAL
    yield "in a row", _Round(interval, spread)
    yield "waited for", _Round(row["wall_us"], spread)


def _of_samples(samples: list[float]) -> _Round:
    low, _, high = statistics.quantiles(samples, n=4)
    return _Round(statistics.median(samples), (high - low) / _QUARTILES_OF_NORMAL)


def _between(batches: Iterable[list[_Round]]) -> float | None:
    """By what share of the time rounds of one batch differ (standard deviation, pooled)."""
    squares, freedom = 0.0, 0
    for rounds in batches:
        mean = statistics.fmean(each.us for each in rounds)
        squares += sum((each.us / mean - 1) ** 2 for each in rounds)
        freedom += len(rounds) - 1
    return math.sqrt(squares / freedom) if freedom else None
