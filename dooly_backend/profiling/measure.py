"""Samples of the calls of one captured step."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from dooly_backend.database.records import Measurement
from dooly_backend.engines import CapturedCall, Engine
from dooly_backend.engines.base import copied, once
from dooly_backend.profiling.ahead import Ahead, Filler
from dooly_backend.profiling.timer import Sample, Timer, undisturbed, wall_time
from dooly_backend.workload import Batch, WorkloadPoint


@dataclass(frozen=True)
class Regime:
    """How often a call is timed, and when its samples are good enough.

    A sample whose call lost its processor to another process is taken again, up
    to `attempts` times, unless that happens all the time. A point is timed
    again, up to `rounds` times, while its median exceeds `spread` times its lower
    quartile or a sample holds launches; it is marked unstable if it stays so. A
    round has `repeats` samples of a call, or fewer, but three, of one that would
    take longer than `budget_us` for them: long calls scatter less. `ahead` is what runs
    ahead of a sample (`profiling/ahead.py`).
    """

    repeats: int = 7
    warmups: int = 1
    rounds: int = 3
    spread: float = 1.15
    attempts: int = 4
    budget_us: float = 3_000_000.0
    ahead: Ahead = "product"

    def samples(self, call_us: float) -> int:
        """How many samples of a call that takes `call_us` a round has."""
        affordable = int(self.budget_us / max(call_us, 1.0))
        return min(self.repeats, max(affordable, FEWEST_SAMPLES))


#: A median of fewer is no median.
FEWEST_SAMPLES = 3


@dataclass(frozen=True)
class Subject:
    """A call to time, the call that ran before it, and a like call with other weights.

    `experts` is how many experts shall fire, where the call is a MoE layer; `between`
    are the calls of the step from the sibling's successor to the predecessor, in order.
    """

    call: CapturedCall
    predecessor: CapturedCall | None
    sibling: CapturedCall | None
    experts: int | None = None
    between: tuple[CapturedCall, ...] = ()

    def lead_in(self, ahead: Ahead) -> list[CapturedCall]:
        """What runs between the emptied caches and the call; the predecessor comes last."""
        if ahead == "layer" and self.between:
            calls = [self.sibling, *self.between]
        else:
            calls = [self.sibling, self.predecessor]
        return [call for call in calls if call is not None]


class _Arguments:
    """The tensors of a call, and copies to restore what the call overwrites.

    An operation's weights are not among them: writing them would warm them.
    """

    def __init__(self, call: CapturedCall) -> None:
        self._tensors = [
            once(leaf)
            for leaf in tree_leaves((call.args, dict(call.kwargs)))
            if isinstance(leaf, torch.Tensor)
            and not isinstance(leaf, torch.nn.Parameter)
            and leaf.numel()
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
    calls: Sequence[CapturedCall] = (),
) -> dict[WorkloadPointKey, Measurement]:
    """Time every subject, taking turns, so that a disturbance hits no single one.

    Keys are (signature hash, point). Times are microseconds. `calls` are all
    captured calls of the step; where it is a large one, a GPU is kept at work with
    them ahead of every sample. What a subject's samples took in all,
    those that are not kept included, is its measurement's `timing_us`.
    """
    filler = Filler(engine.call, timer, calls, regime.ahead)
    arguments = {key: _Arguments(subject.call) for key, subject in subjects.items()}
    settled: dict[WorkloadPointKey, list[Sample]] = {}
    took_us = dict.fromkeys(subjects, 0.0)
    pending = list(subjects)
    order = random.Random(0)
    for round_number in range(regime.rounds):
        fresh: dict[WorkloadPointKey, list[Sample]] = {key: [] for key in pending}
        quickest: dict[WorkloadPointKey, float] = {}  # a warm-up counts here
        for turn in range(regime.warmups + regime.repeats):
            # In another order each time: a place in the order can take a microsecond longer.
            for key in order.sample(pending, len(pending)):
                if len(fresh[key]) >= regime.samples(quickest.get(key, 0.0)):
                    continue
                began = time.perf_counter_ns()
                sample = _sample(engine, timer, subjects[key], arguments[key], regime, filler)
                took_us[key] += (time.perf_counter_ns() - began) / 1000
                quickest[key] = min(sample.us, quickest.get(key, sample.us))
                if turn >= regime.warmups:
                    fresh[key].append(sample)
        for key, samples in fresh.items():
            if key not in settled or _faults(samples) < _faults(settled[key]):
                settled[key] = samples
        pending = [key for key in pending if _faults(settled[key]) > (False, regime.spread)]
        if not pending or round_number == regime.rounds - 1 or not timer.is_calm:
            break
    return {
        key: Measurement(key[1], tuple(s.us for s in samples), key in pending, took_us[key])
        for key, samples in settled.items()
    }


WorkloadPointKey = tuple[str, WorkloadPoint]


def _faults(samples: Sequence[Sample]) -> tuple[bool, float]:
    """Whether one of them holds launches, which is worst; and how far they are apart."""
    return any(s.exposed for s in samples), spread([s.us for s in samples])


def _sample(
    engine: Engine,
    timer: Timer,
    subject: Subject,
    arguments: _Arguments,
    regime: Regime,
    filler: Filler,
) -> Sample:
    """An undisturbed call, or the quickest one when all were disturbed."""
    samples: list[Sample] = []
    while len(samples) < regime.attempts:
        with engine.routed(subject.experts):
            samples.append(
                _call_as_in_a_step(engine, timer, subject, arguments, filler, regime.ahead)
            )
        if not samples[-1].disturbed:
            return samples[-1]
        if not timer.is_calm:
            break
    return min(samples, key=lambda sample: sample.us)


def _call_as_in_a_step(
    engine: Engine,
    timer: Timer,
    subject: Subject,
    arguments: _Arguments,
    filler: Filler,
    ahead: Ahead,
) -> Sample:
    """One timed call after what a step would have run before it."""
    if subject.sibling is None:
        # No other layer has this call: itself keeps the code warm, ahead of the flush.
        engine.call(subject.call)
    ahead_us = filler()
    timer.flush()
    calls = subject.lead_in(ahead)
    last = calls.pop() if subject.predecessor is not None else None
    for call in calls:
        engine.call(call)
    if not subject.between or ahead == "product":
        timer.pass_by()
    if timer.inputs_age:
        with engine.running(subject.call.context):
            arguments.restore()
    if last is not None:
        engine.call(last)
    with engine.running(subject.call.context):
        if not timer.inputs_age:
            arguments.restore()
        return timer.time(subject.call, ahead_us)


def spread(samples: Sequence[float]) -> float:
    """Median over lower quartile: 1 where nothing disturbed the samples."""
    if len(samples) < 2:
        return 1.0
    lower = statistics.quantiles(samples, n=4, method="inclusive")[0]
    return statistics.median(samples) / lower if lower else 1.0


def step_samples(
    engine: Engine, timer: Timer, batch: Batch, layers: int, repeats: int
) -> tuple[float, ...]:
    """Wall time in microseconds of live steps of the first `layers` layers, caches flushed."""
    samples: list[Sample] = []

    def run(step: Callable[[], None]) -> None:
        def whole() -> None:
            step()
            engine.synchronize()

        timer.flush()
        engine.synchronize()
        samples.append(wall_time(whole))

    engine.live_steps(batch, repeats, run, layers)
    return undisturbed(samples)
