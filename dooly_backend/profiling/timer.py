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


class CudaTimer(Timer):
    """Time between two events around the call, launched behind work that hides the host.

    Kernels of a call are launched while the device still sleeps, so that the
    events see them back to back, as in a step that the device bounds. A call
    that took longer to launch than the device slept is disturbed, and gets
    more time from then on. What the events see when nothing runs between
    them is taken off every sample.
    """

    _FLUSH_BYTES = 192 << 20
    _LEAD_US = 1_000.0  # most calls are launched within this time
    _CYCLES_PER_US = 2_000  # at the highest clock; a lower one sleeps longer
    _LONGEST_LEAD_US = 50_000.0
    _WARM_UP_S = 0.3  # until the clock has risen from idle

    def __init__(self) -> None:
        self._buffer = torch.ones(self._FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._leads: dict[int, float] = {}
        self.empty_us = 0.0
        self._warm_up()
        self.empty_us = statistics.median(self.time(_nothing).us for _ in range(101))

    def _warm_up(self) -> None:
        end = time.monotonic() + self._WARM_UP_S
        while time.monotonic() < end:
            self.flush()
            torch.cuda.synchronize()

    def flush(self) -> None:
        self._buffer.sum()

    def time(self, call: Call, ahead_us: float = 0.0) -> Sample:
        key = id(getattr(call, "target", call))
        lead_us = self._leads.get(key, self._LEAD_US)
        began = time.perf_counter_ns()
        if ahead_us < 2 * lead_us:
            torch.cuda._sleep(int(lead_us * self._CYCLES_PER_US))
        self._start.record()
        call()
        self._end.record()
        launch_us = (time.perf_counter_ns() - began) / 1000
        self._end.synchronize()
        us = max(self._start.elapsed_time(self._end) * 1000 - self.empty_us, 0.0)
        if launch_us <= max(lead_us, ahead_us):
            return Sample(us)
        self._leads[key] = min(2 * launch_us, self._LONGEST_LEAD_US)
        return Sample(us, disturbed=True)

    def repeats_until_hot(self, call: Call) -> int:
        call()
        took = max(min(self.time(call).us for _ in range(3)), 1.0)
        return max(1, round(self.BUSY_US / took))


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
