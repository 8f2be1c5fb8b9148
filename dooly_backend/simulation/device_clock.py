"""The clock of a device in a simulation: how warm earlier steps have left it."""

from __future__ import annotations

from dooly_backend.regression.clock import ClockResponse, cooled, heated


class DeviceClock:
    """The state of one device: steps come in the order in which it runs them.

    Without a response its clock is steady.
    """

    def __init__(self, response: ClockResponse | None) -> None:
        self._response = response
        self._heat = 0.0
        self._since_s = 0.0  # when the last heavy step ended

    def heavy(self, begin_s: float, stream_s: float) -> float:
        """Seconds of a heavy step that begins at `begin_s` and takes `stream_s` in a stream."""
        response = self._response
        if response is None or stream_s <= 0.0:
            return stream_s
        heat = cooled(self._heat, begin_s - self._since_s, response.tau_s)
        took = response.took_s(heat, stream_s)
        self._heat = heated(heat, took, response.tau_s)
        self._since_s = begin_s + took
        return took
