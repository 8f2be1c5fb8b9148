"""Timing one call as a step would run it: cold weights, warm code, real predecessor.

A hot loop on the same tensors finds the weights in the cache and is up to 52%
too fast for a decode; see docs/measuring.md for the regimes compared.
"""

from __future__ import annotations

import gc
import resource
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dooly_backend.engines import Engine

Call = Callable[[], Any]

#: Samples that tell whether the host is calm.
_RECENT = 48


@dataclass(frozen=True)
class Sample:
    """One timed call.

    `disturbed`: the call lost its processor to somebody else meanwhile, or its device
    waited for the host; the latter is `exposed`: the time holds launches, and is too long.
    """

    us: float
    disturbed: bool = False
    exposed: bool = False


class Timer(ABC):
    """Times one call at a time, on one device."""

    #: How long a device is kept at work ahead of a sample: its clock follows its power draw
    #: within a few milliseconds.
    BUSY_US = 5_000.0
    #: Whether taking a disturbed sample again is worth while.
    is_calm: bool = True

    @abstractmethod
    def flush(self) -> None:
        """Empty the caches of weights, by reading: written lines would be written back later."""

    #: Whether a call's inputs are put in place ahead of its predecessor, not behind it.
    inputs_age: bool = False

    def pass_by(self) -> None:
        """What goes through the caches between the same code of two layers, if that matters."""
        return None

    @abstractmethod
    def time(self, call: Call, ahead_us: float = 0.0) -> Sample:
        """The time that `call` takes on the device.

        `ahead_us` is how long the device is still busy with what was launched before.
        """

    def repeats_until_hot(self, call: Call) -> int:
        """How often `call` must run until the device's clock has given way to such work.

        0 where no clock does; see docs/measuring.md.
        """
        return 0


class CpuTimer(Timer):
    """Wall time of the calling thread; operations on a CPU are synchronous.

    Between the same code of two layers lie a layer's weights: of that code the
    core's own caches hold nothing any more, and of a call's inputs only what its
    predecessor left. docs/measuring.md has the figures.
    """

    inputs_age = True

    def __init__(self, cache_bytes: int | None = None) -> None:
        size = 2 * (cache_bytes or last_level_cache())
        self._buffer = torch.ones(max(size, 1 << 24) // 8, dtype=torch.int64)
        self._passing = self._buffer[: self._buffer.numel() // 8]  # a quarter of the cache
        self._recent: deque[bool] = deque(maxlen=_RECENT)

    def flush(self) -> None:
        self._buffer.sum()

    def pass_by(self) -> None:
        self._passing.sum()

    def time(self, call: Call, ahead_us: float = 0.0) -> Sample:
        sample = wall_time(call)
        self._recent.append(sample.disturbed)
        return sample

    @property
    def is_calm(self) -> bool:  # type: ignore[override]
        """Whether most of the recent samples were undisturbed.

        On a host where others take the processor all the time, samples taken
        again are disturbed again.
        """
        return len(self._recent) < _RECENT or sum(self._recent) < _RECENT // 2


def wall_time(call: Call) -> Sample:
    """Wall time of `call`; disturbed when a thread of this process was preempted meanwhile."""
    before = _preemptions()
    start = time.perf_counter_ns()
    call()
    elapsed = time.perf_counter_ns() - start
    return Sample(elapsed / 1000, _preemptions() != before)


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def undisturbed(samples: Sequence[Sample], fewest: int = 3) -> tuple[float, ...]:
    """Microseconds of the undisturbed samples, or of all when fewer than `fewest` are."""
    calm = tuple(sample.us for sample in samples if not sample.disturbed)
    return calm if len(calm) >= fewest else tuple(sample.us for sample in samples)


def timer_for(engine: Engine) -> Timer:
    """The timer of the engine's device."""
    from dooly_backend.profiling.cuda_timer import CudaTimer

    return CudaTimer() if engine.environment.device_kind == "cuda" else CpuTimer()


def last_level_cache(default: int = 32 << 20) -> int:
    """Bytes of the largest cache of the first CPU; `default` where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    return max(sizes, default=default)


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Write into `seconds` for how many the block ran."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[part] = time.monotonic() - began


@contextmanager
def quiet_process() -> Iterator[None]:
    """Keep the garbage collector out of the measurements."""
    gc.collect()
    gc.freeze()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.unfreeze()
