"""Samples of the calls of one captured step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dooly_backend.database.records import Measurement
from dooly_backend.engines import CapturedCall, Engine
from dooly_backend.engines.base import copied
from dooly_backend.profiling.timer import Timer
from dooly_backend.workload import WorkloadPoint


@dataclass(frozen=True)
class Regime:
    """How often a call is timed, and when its samples are good enough.

    A point is timed again, up to `rounds` times, while its median exceeds
    `spread` times its lower quartile; it is marked unstable if it stays so.
    """

    repeats: int = 7
    warmups: int = 1
    rounds: int = 3
    spread: float = 1.15


@dataclass(frozen=True)
class Subject:
    """A call to time, the call that ran before it, and a like call with other weights."""

    call: CapturedCall
    predecessor: CapturedCall | None
    sibling: CapturedCall | None


class _Arguments:
    """The tensors of a call, and copies to restore what the call overwrites."""

    def __init__(self, call: CapturedCall) -> None:
        self._tensors = [
            leaf
            for leaf in tree_leaves((call.args, dict(call.kwargs)))
            if isinstance(leaf, torch.Tensor) and leaf.numel()
        ]
        self._originals: list[torch.Tensor] = copied(self._tensors)

    def restore(self) -> None:
        """Put the values back; it also leaves them in the cache, as a predecessor does."""
        for tensor, original in zip(self._tensors, self._originals, strict=True):
            tensor.copy_(original)


def measure(
    engine: Engine,
    timer: Timer,
    subjects: Mapping[WorkloadPointKey, Subject],
    regime: Regime,
) -> dict[WorkloadPointKey, Measurement]:
    """Time every subject, taking turns, so that a disturbance hits no single one.

    Keys are (signature hash, point). Times are microseconds.
    """
    arguments = {key: _Arguments(subject.call) for key, subject in subjects.items()}
    settled: dict[WorkloadPointKey, list[float]] = {}
    pending = list(subjects)
    for round_number in range(regime.rounds):
        fresh: dict[WorkloadPointKey, list[float]] = {key: [] for key in pending}
        for turn in range(regime.warmups + regime.repeats):
            for key in pending:
                sample = _sample(engine, timer, subjects[key], arguments[key])
                if turn >= regime.warmups:
                    fresh[key].append(sample)
        for key, samples in fresh.items():
            if key not in settled or spread(samples) < spread(settled[key]):
                settled[key] = samples
        pending = [key for key in pending if spread(settled[key]) > regime.spread]
        if not pending or round_number == regime.rounds - 1:
            break
    return {
        key: Measurement(key[1], tuple(samples), unstable=key in pending)
        for key, samples in settled.items()
    }


WorkloadPointKey = tuple[str, WorkloadPoint]


def _sample(engine: Engine, timer: Timer, subject: Subject, arguments: _Arguments) -> float:
    """One timed call after what a step would have run before it."""
    if subject.sibling is None:
        # No other layer has this call: itself keeps the code warm, ahead of the flush.
        engine.call(subject.call)
    timer.flush()
    if subject.sibling is not None:
        engine.call(subject.sibling)
    if subject.predecessor is not None:
        engine.call(subject.predecessor)
    with engine.running(subject.call.context):
        arguments.restore()
        return timer.time_us(subject.call)


def spread(samples: Sequence[float]) -> float:
    """Median over lower quartile: 1 where nothing disturbed the samples."""
    lower = statistics.quantiles(samples, n=4, method="inclusive")[0]
    return statistics.median(samples) / lower if lower else 1.0


def step_samples(
    engine: Engine, timer: Timer, batch: Any, layers: int, repeats: int
) -> tuple[float, ...]:
    """Wall time in microseconds of live steps of the first `layers` layers, caches flushed."""
    return tuple(engine.live_steps(batch, repeats, layers, before=timer.flush))
