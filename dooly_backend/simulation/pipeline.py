"""The later stages of a pipeline on a virtual clock.

A stage takes the steps in their order, each when the stage before has handed it
over and this one is done with the step before. Stages overlap, and bubbles are
what is left where none is there to be taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from dooly_backend.regression.clock import ClockResponse
from dooly_backend.simulation.device_clock import DeviceClock


class LaterStages:
    """When the stages after the first are free. Seconds; each stage has a device of its own."""

    def __init__(self, clock: ClockResponse | None = None) -> None:
        self._response = clock
        self._free: list[float] = []
        self._clocks: list[DeviceClock] = []

    def done_s(self, handed_s: float, stages_s: Sequence[float], tokens: int) -> float:
        """When the last stage is done with a step that the first one hands over at `handed_s`.

        `stages_s` is what each later stage takes, receiving the step included, and
        `tokens` are the step's new ones.
        """
        while len(self._free) < len(stages_s):
            self._free.append(0.0)
            if self._response is not None:
                self._clocks.append(DeviceClock(self._response))
        done = handed_s
        for stage, took in enumerate(stages_s):
            begin = max(done, self._free[stage])
            if self._clocks:
                took = self._clocks[stage].step(begin, took, tokens)
            done = self._free[stage] = begin + took
        return done
