"""Processors of this host: how quick each is now, and the launching thread held on the quickest.

On a shared host a virtual processor whose core a neighbour works on launches a step up to
twice as slowly, which nobody inside the machine is told (docs/gpu.md); a server whose
threads are pinned to cores of its own does not see that. What a fixed piece of work takes
tells it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_WORK = 20_000  # turns of a loop: about a millisecond
_SAMPLES = 7
_QUICK_SAMPLES = 3  # where it is asked ahead of every batch: 35 to 80 ms for 16 processors
_SIBLINGS = Path("/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list")


class Where:
    """Where the launching thread runs: anywhere. `about` is what files say of it."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}

    def spread(self) -> None:
        """Keep threads that were started since off the launching thread's core, if it has one."""

    def again(self) -> None:
        """Go to the processor that is the quickest now, if one is held."""


ANYWHERE = Where()


class Held(Where):
    """The launching thread alone on one processor, this process's others off its core.

    Threads that are started later inherit the caller's processor: `spread`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._allowed = os.sched_getaffinity(0)
        self._others = self._allowed

    def spread(self) -> None:
        _set_others(self._others)

    def again(self) -> None:
        self.choose(_QUICK_SAMPLES)

    def choose(self, samples: int = _SAMPLES) -> None:
        """Hold the processor that is the quickest now."""
        taken_us = speeds(self._allowed, samples)
        processor = quickest(taken_us)
        self.hold(processor)
        slowest = round(max(taken_us.values()) / taken_us[processor], 2)
        work_us = round(taken_us[processor])
        self.about = {"held_on": processor, "work_us": work_us, "slowest": slowest}

    def hold(self, processor: int) -> None:
        """Hold this one."""
        others = self._allowed - siblings(processor) - {processor}
        self._others = others or self._allowed
        self.spread()
        os.sched_setaffinity(0, {processor})

    def release(self) -> None:
        """Let all threads go where the calling one was allowed to."""
        os.sched_setaffinity(0, self._allowed)
        _set_others(self._allowed)


def speeds(processors: set[int] | None = None, samples_of_each: int = _SAMPLES) -> dict[int, float]:
    """Microseconds that the same work takes on each of `processors` (None: all allowed ones).

    The median of a few milliseconds each, the processors in turns, so that a
    moment's disturbance hits none alone.
    """
    allowed = os.sched_getaffinity(0)
    chosen = sorted(allowed if processors is None else processors)
    samples: dict[int, list[float]] = {processor: [] for processor in chosen}
    try:
        for _ in range(samples_of_each):
            for processor in chosen:
                os.sched_setaffinity(0, {processor})
                samples[processor].append(_work_us())
    finally:
        os.sched_setaffinity(0, allowed)
    return {processor: sorted(us)[len(us) // 2] for processor, us in samples.items()}


def quickest(taken_us: Mapping[int, float]) -> int:
    """The processor on which the work of `speeds` takes the least."""
    return min(taken_us, key=lambda processor: (taken_us[processor], processor))


@contextmanager
def held_if(hold: bool) -> Iterator[Where]:
    """The calling thread alone on the quickest processor of the moment, or anywhere."""
    if not hold:
        yield ANYWHERE
        return
    with holding() as held:
        held.choose()
        yield held


@contextmanager
def holding() -> Iterator[Held]:
    """What holds the calling thread inside the block."""
    held = Held()
    try:
        yield held
    finally:
        held.release()


@contextmanager
def held_on(processor: int | None) -> Iterator[None]:
    """Keep the calling thread on one processor; None leaves it to the system."""
    allowed = os.sched_getaffinity(0)
    if processor is not None:
        os.sched_setaffinity(0, {processor})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def siblings(processor: int) -> set[int]:
    """Processors of the same core, itself among them, as the system tells ("0-1", "0,64")."""
    try:
        text = Path(str(_SIBLINGS).format(processor)).read_text()
    except OSError:  # not told: it is alone on its core as far as anybody knows
        return {processor}
    found = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _set_others(processors: set[int]) -> None:
    """All threads of this process but the calling one."""
    here = int(Path("/proc/thread-self").resolve().name)
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) != here:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread.name), processors)


def _work_us() -> float:
    start = time.perf_counter_ns()
    total = 0
    for number in range(_WORK):
        total += number & 7
    return (time.perf_counter_ns() - start) / 1000
