"""Timing one call on a GPU: between two events, launched before the device gets there.

A sample in which the device got there first contains launches, not kernels only. That
is seen, not guessed: the event ahead of the call has passed by the time the last launch
returns. Such a sample is disturbed, and the next one of that call gets more time.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import torch

from dooly_backend.profiling.timer import Call, Sample, Timer


class CudaDevice:
    """What the timer needs of the host's clock and of the device's current stream."""

    _CYCLES_PER_US = 2_000  # at the highest clock; a lower one sleeps longer
    _FLUSH_BYTES = 192 << 20

    def __init__(self) -> None:
        self._buffer = torch.ones(self._FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def now_us(self) -> float:
        """The host's clock."""
        return time.perf_counter_ns() / 1000

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)

    def sleep(self, us: float) -> None:
        """Launch a kernel that keeps the device from what is launched after it."""
        torch.cuda._sleep(int(us * self._CYCLES_PER_US))

    def flush(self) -> None:
        """Launch a reading of more than the caches hold."""
        self._buffer.sum()

    def small(self) -> None:
        """Launch a kernel that takes a microsecond or two."""
        self._buffer[:256].add_(0)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


_OVERHEAD_SAMPLES = 51
_CHAIN = 21  # kernels


class CudaTimer(Timer):
    """Time between two events around the call, launched behind work that hides the host.

    Kernels of a call are launched while the device still sleeps, or works on what was
    launched ahead, so that the events see them back to back, as in a step that the device
    bounds. How long a call takes to launch is learned from its last samples. What the
    events add to a single kernel is taken off every sample.
    """

    _LEAD_US = 1_000.0  # most calls are launched within this time
    _LONGEST_LEAD_US = 100_000.0
    _REMEMBERED = 8  # samples of a call: a first one that compiles code is forgotten
    _WARM_UP_US = 300_000.0  # until the clock has risen from idle

    def __init__(self, device: CudaDevice | None = None) -> None:
        self._device = device or CudaDevice()
        self._start, self._end = self._device.event(), self._device.event()
        self._launches: dict[int, deque[float]] = {}
        self._sleeps_left: dict[int, int] = {}
        self.empty_us = 0.0
        self._warm_up()
        self.empty_us = self._overhead_us()

    def _warm_up(self) -> None:
        end = self._device.now_us() + self._WARM_UP_US
        while self._device.now_us() < end:
            self.flush()
            self._device.synchronize()

    def _overhead_us(self) -> float:
        """What a sample of one kernel has beyond what one more kernel adds to a stream.

        With nothing between them two events see 1.25 us on an H200, but between two
        kernels of a stream the device rests as well, which is part of a step: with all of
        it taken off, sums of some 60 calls fell 3 to 6% short of small decodes.
        """
        single, chain = [], []
        for _ in range(_OVERHEAD_SAMPLES):
            single.append(self.time(self._device.small).us)
            chain.append(self.time(self._chain).us)
        one, many = statistics.median(single), statistics.median(chain)
        return max(0.0, one - (many - one) / (_CHAIN - 1))

    def _chain(self) -> None:
        for _ in range(_CHAIN):
            self._device.small()

    def flush(self) -> None:
        self._device.flush()

    def time(self, call: Call, ahead_us: float = 0.0) -> Sample:
        """The call's time; disturbed when the device had to wait for its launches.

        Work ahead hides the launches only while it lasts: the host has launched other calls
        since, and a mixture-of-experts layer takes it milliseconds. Where it did not last,
        the next samples of this call sleep as well.
        """
        key = id(getattr(call, "target", call))
        launches = self._launches.setdefault(key, deque(maxlen=self._REMEMBERED))
        lead_us = min(max(self._LEAD_US, 2 * max(launches, default=0.0)), self._LONGEST_LEAD_US)
        began = self._device.now_us()
        sleeps = ahead_us < 2 * lead_us or self._sleeps_left.get(key, 0) > 0
        if sleeps:
            self._device.sleep(lead_us)
        self._start.record()
        call()
        self._end.record()
        launches.append(self._device.now_us() - began)
        was_late = self._start.query()
        self._end.synchronize()
        us = max(self._start.elapsed_time(self._end) * 1000 - self.empty_us, 0.0)
        if sleeps:
            self._sleeps_left[key] = max(self._sleeps_left.get(key, 0) - 1, 0)
        elif was_late:
            self._sleeps_left[key] = self._REMEMBERED
        return Sample(us, disturbed=was_late, exposed=was_late)

    def repeats_until_hot(self, call: Call) -> int:
        """As the base class says, by the quickest of three samples that hold no launches."""
        call()
        samples = [self.time(call)]
        while len(samples) < 9 and sum(not sample.disturbed for sample in samples) < 3:
            samples.append(self.time(call))
        calm = [sample.us for sample in samples if not sample.disturbed]
        took = max(min(calm or [sample.us for sample in samples]), 1.0)
        return max(1, round(self.BUSY_US / took))
