"""Timing one call as a step would run it: cold weights, warm code, real predecessor.

A hot loop on the same tensors finds the weights in the cache and is up to 52%
too fast for a decode; see docs/measuring.md for the regimes compared.
"""

from __future__ import annotations

import gc
import resource
import statistics
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
    """One timed call. `disturbed`: the call lost its processor to somebody else meanwhile."""

    us: float
    disturbed: bool = False


class Timer(ABC):
    """Times one call at a time, on one device."""

    #: Whether taking a disturbed sample again is worth while.
    is_calm: bool = True

    @abstractmethod
    def flush(self) -> None:
        """Empty the caches of weights, by reading: written lines would be written back later."""

    @abstractmethod
    def time(self, call: Call, ahead_us: float = 0.0) -> Sample:
        """The time that `call` takes on the device.

        `ahead_us` is how long the device is still busy with what was launched before.
        """

    def long_enough(self, call: Call) -> float:
        """What `call` takes on the device where it is worth repeating as filler, else 0.

        A device whose clock gives way to sustained work must be kept at work while its
        operations are timed; see docs/measuring.md.
        """
        return 0.0


class CpuTimer(Timer):
    """Wall time of the calling thread; operations on a CPU are synchronous."""

    def __init__(self, cache_bytes: int | None = None) -> None:
        size = 2 * (cache_bytes or last_level_cache())
        self._buffer = torch.ones(max(size, 1 << 24) // 8, dtype=torch.int64)
        self._recent: deque[bool] = deque(maxlen=_RECENT)

    def flush(self) -> None:
        self._buffer.sum()

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


class CudaTimer(Timer):
    """Time between two events around the call, launched behind work that hides the host.

    Kernels of a call are launched while the device still sleeps, so that the
    events see them back to back, as in a step that the device bounds. What the
    events see when nothing runs between them is taken off every sample.
    """

    _FLUSH_BYTES = 192 << 20
    #: The host launches a call, its sibling and its predecessor within this time.
    _LEAD_US = 2_500.0
    _SLEEP_CYCLES = 2_000_000

    def __init__(self) -> None:
        self._buffer = torch.ones(self._FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self.empty_us = 0.0
        self.empty_us = statistics.median(self.time(_nothing).us for _ in range(101))

    def flush(self) -> None:
        self._buffer.sum()

    def time(self, call: Call, ahead_us: float = 0.0) -> Sample:
        if ahead_us < self._LEAD_US:
            # Long enough for the host to launch the call behind it.
            torch.cuda._sleep(self._SLEEP_CYCLES)
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return Sample(max(self._start.elapsed_time(self._end) * 1000 - self.empty_us, 0.0))

    def long_enough(self, call: Call) -> float:
        call()
        took = min(self.time(call).us for _ in range(2))
        return took if took >= self._LEAD_US else 0.0


def _nothing() -> None:
    return None


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
