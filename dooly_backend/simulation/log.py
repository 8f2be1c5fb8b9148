"""The steps of a simulation as they are scheduled, and the virtual clock.

The clock may lag behind: steps are written down first and timed later, many at
once. Its rule is told in `engines/vllm_scheduler.py`; sums are formed in the
same order there and here, so that both give the same floating-point numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dooly_backend.regression.clock import ClockResponse
from dooly_backend.simulation.columns import Steps
from dooly_backend.simulation.device_clock import DeviceClock
from dooly_backend.simulation.pipeline import LaterStages
from dooly_backend.simulation.records import Batches, Integers, ManyStepTimer, Numbers, StepTimes

LAUNCHES, TAKES = 1, 2  # what a turn of the engine's loop does to a step: both, one or none
BOTH = LAUNCHES | TAKES

_ENTRIES = 1 << 20  # scheduled requests that are timed at once
_FEWEST_STEPS = 8  # tried at once where the clock may end a stretch of steps
_MOST_STEPS = 4096


class Log:
    """Stretches of steps that differ by one token of context each, and when they ran."""

    def __init__(self, timer: ManyStepTimer, clock: ClockResponse | None = None) -> None:
        self._timer = timer
        self._launches_wait = getattr(timer, "launches_wait", False)
        self._clock = DeviceClock(clock) if clock else None
        self._later = LaterStages(clock)
        self.now = 0.0
        self.turn_s = [0.0]  # the clock after so many turns
        self._device_free = 0.0
        self._start: list[float] = []
        self._launched: list[float] = []
        self._due: list[float] = []  # when the device is done with a step
        self._outputs: list[float] = []  # what the host needs after it
        self._took: list[float] = []  # what the device really needed, where its clock gives way
        self._ready: list[float] = []
        self._end: list[float] = []
        # Stretches: how many steps, of how many requests, and what their first steps compute.
        self._counts: list[int] = []
        self._sizes: list[int] = []
        self._ids: list[int] = []
        self._queries: list[int] = []
        self._contexts: list[int] = []
        self._timed = 0  # so many stretches have times, which began with so many entries
        self._timed_entries = 0
        self._turns: list[tuple[int, int]] = []  # turns that the clock has not seen: what, how many
        self._times: list[StepTimes] = []

    # -- what happens ----------------------------------------------------------------------

    def add_step(self, ids: list[int], queries: list[int], contexts: list[int]) -> None:
        """A step is scheduled."""
        self._counts.append(1)
        self._sizes.append(len(ids))
        self._ids += ids
        self._queries += queries
        self._contexts += contexts

    def turn(self, what: int) -> None:
        """The engine's loop turned once: it launched a step, took one's result, both or none."""
        self._turns.append((what, 1))

    def add_stride(self, ids: list[int], contexts: list[int], steps: int) -> None:
        """The same requests decode in `steps` steps, a turn each, of which nothing ends one."""
        self.add_step(ids, [1] * len(ids), contexts)
        self._counts[-1] = steps
        self._turns.append((BOTH, steps))

    def take_stride(self, ids: list[int], contexts: list[int], steps: int, until_s: float) -> int:
        """As `add_stride`, but it ends with the first turn that ends at `until_s` or after.

        Returns how many steps were taken. The clock must be `settled`.
        """
        times = self._timer.times(Batches.decodes(np.array(contexts, np.int64), steps))
        taken = self._tick(times, [(BOTH, steps)], until_s)
        self.add_step(ids, [1] * len(ids), contexts)
        self._counts[-1] = taken
        self._times.append(_first(times, taken))
        self._timed += 1
        self._timed_entries += len(ids)
        return taken

    def steps_until(self, until_s: float) -> int:
        """About how many steps like the last one there are until then, rather too many."""
        last = self.turn_s[-1] - self.turn_s[-2] if len(self.turn_s) > 1 else 0.0
        if last <= 0:
            return _FEWEST_STEPS
        about = 1.1 * (until_s - self.now) / last
        return int(min(max(about, _FEWEST_STEPS), _MOST_STEPS))

    def wait(self, until_s: float) -> None:
        """Nothing runs until then. The clock must be `settled`."""
        self.now = max(self.now, until_s)

    def settle(self) -> None:
        """Let the clock catch up with what has been scheduled."""
        known: list[StepTimes] = []
        while self._timed < len(self._counts):
            end, entries = self._timed, 0
            while end < len(self._counts) and (not entries or entries < _ENTRIES):
                entries += self._counts[end] * self._sizes[end]
                end += 1
            _, batches = self._expand(self._timed, end, self._timed_entries)
            known.append(self._timer.times(batches))
            self._timed_entries += sum(self._sizes[self._timed : end])
            self._timed = end
        if known:
            self._times += known
            self._tick(_joined(known), self._turns)
        elif self._turns:
            self._tick(_NO_TIMES, self._turns)
        self._turns.clear()

    def _tick(self, times: StepTimes, turns: list[tuple[int, int]], until_s: float = np.inf) -> int:
        """Turn by turn, until a turn ends at `until_s` or after; returns how many there were.

        `times` are those of the steps that these turns launch.
        """
        host = (times.host_us / 1e6).tolist()
        device = (times.device_us / 1e6).tolist()
        launch = (launches(times) / 1e6).tolist()
        tokens = _tokens(times).tolist()
        later = None if times.later_us is None else (times.later_us / 1e6).tolist()
        # Of steps launched before, too: their results may be taken now.
        self._outputs += (times.output_us / 1e6).tolist()
        now, free = self.now, self._device_free
        launched = taken = 0
        for what, count in turns:
            for _ in range(count):
                if what & LAUNCHES:
                    self._start.append(now)
                    now += host[launched]
                    begin = max(free, now)
                    now = (begin if self._launches_wait else now) + launch[launched]
                    self._launched.append(now)
                    took = device[launched]
                    if self._clock:
                        took = self._clock.step(begin, took, tokens[launched])
                        self._took.append(took)
                    free = max(begin + took, now)
                    done = free
                    if later is not None:
                        done = self._later.done_s(free, later[launched], tokens[launched])
                    self._due.append(done)
                    launched += 1
                if what & TAKES:
                    step = len(self._end)
                    now = max(now, self._due[step])
                    self._ready.append(now)
                    now += self._outputs[step]
                    self._end.append(now)
                self.turn_s.append(now)
                taken += 1
                if now >= until_s:
                    break
            if now >= until_s:
                break
        self.now, self._device_free = now, free
        del self._outputs[len(self._start) :]
        return taken

    # -- afterwards ------------------------------------------------------------------------

    def steps(self, preempted: Mapping[int, tuple[int, ...]]) -> Steps:
        """All steps. The clock must be `settled`."""
        ids, batches = self._expand(0, len(self._counts), 0)
        return Steps(
            np.array(self._start),
            np.array(self._launched),
            np.array(self._ready),
            np.array(self._end),
            batches.starts,
            ids,
            batches.query,
            batches.context,
            self._as_it_was(_joined(self._times)) if self._times else None,
            preempted,
        )

    def _as_it_was(self, times: StepTimes) -> StepTimes:
        """With the time that the device really needed."""
        return replace(times, device_us=np.array(self._took) * 1e6) if self._clock else times

    def _expand(self, begin: int, end: int, entry: int) -> tuple[Integers, Batches]:
        """Ids and batches of the steps of the stretches from `begin` up to `end`.

        `entry` is where the first one's requests begin.
        """
        counts = np.array(self._counts[begin:end], np.int64)
        sizes = np.array(self._sizes[begin:end], np.int64)
        stop = entry + int(sizes.sum())
        stretch = np.repeat(np.arange(len(counts)), counts)  # of every step
        step_sizes = sizes[stretch]
        starts = np.cumsum(step_sizes) - step_sizes
        later = ranges(np.zeros_like(counts), counts)  # how many steps after the stretch's first
        first = np.cumsum(sizes) - sizes
        source = ranges(first[stretch], step_sizes)
        ids = np.array(self._ids[entry:stop], np.int64)[source]
        query = np.array(self._queries[entry:stop], np.int64)[source]
        context = np.array(self._contexts[entry:stop], np.int64)[source]
        context += np.repeat(later, step_sizes)
        return ids, Batches(query, context, starts)


def ranges(begins: Integers, counts: Integers) -> Integers:
    """The numbers from every one of `begins` on, as many as `counts` says, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(begins - (ends - counts), counts)


def _first(times: StepTimes, count: int) -> StepTimes:
    return StepTimes(
        times.device_us[:count],
        times.host_us[:count],
        times.output_us[:count],
        times.extrapolated[:count],
        None if times.launch_us is None else times.launch_us[:count],
        None if times.tokens is None else times.tokens[:count],
        None if times.later_us is None else times.later_us[:count],
    )


def _joined(times: list[StepTimes]) -> StepTimes:
    if len(times) == 1:
        return times[0]
    later = [t.later_us for t in times if t.later_us is not None]
    return StepTimes(
        np.concatenate([t.device_us for t in times]),
        np.concatenate([t.host_us for t in times]),
        np.concatenate([t.output_us for t in times]),
        np.concatenate([t.extrapolated for t in times]),
        np.concatenate([launches(t) for t in times]),
        np.concatenate([_tokens(t) for t in times]),
        None if not later else np.concatenate(later),
    )


def launches(times: StepTimes) -> Numbers:
    """`launch_us`, as an array in any case."""
    return np.zeros(len(times.device_us)) if times.launch_us is None else times.launch_us


def _tokens(times: StepTimes) -> Integers:
    return np.zeros(len(times.device_us), np.int64) if times.tokens is None else times.tokens


_NO_TIMES = StepTimes(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.bool_))
