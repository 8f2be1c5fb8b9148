"""The clock of a device in a simulation: how warm earlier steps have left it."""

from __future__ import annotations

from dooly_backend.regression.clock import ClockResponse


class DeviceClock:
    """The state of one device whose clock responds like this."""

    def __init__(self, response: ClockResponse) -> None:
        self._response = response
        self._heat = 0.0
        self._since_s = 0.0  # when the last step ended

    def step(self, begin_s: float, steady_s: float, tokens: int) -> float:
        """Seconds of a step of `tokens` new tokens that begins at `begin_s`.

        `steady_s` is what a heavy step takes in a long stream of such, and a light one on a
        rested device. Steps come in the order in which the device runs them.
        """
        response = self._response
        heat = response.after(self._heat, max(0.0, begin_s - self._since_s))
        took = response.took_s(heat, steady_s, tokens)
        self._heat = response.after(heat, took, response.target(tokens))
        self._since_s = begin_s + took
        return took
