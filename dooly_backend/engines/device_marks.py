"""When the device worked on a step: events in its queue before and after what the host launches.

Where the host launches faster than the device works, the time between a step's
two events is the device's own, whatever the host does meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Mark = tuple[float | None, float | None]  # began, and how long it took: microseconds


class NoMarks:
    """Without an accelerator the host computes: there is nothing else to tell."""

    def __init__(self) -> None:
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Launch one step in the `with` block."""
        self._steps += 1
        yield

    def since(self, first: int) -> list[Mark]:
        """One entry for every step from number `first` on, times since that one began.

        The device must have finished.
        """
        return [(None, None)] * (self._steps - first)


class CudaMarks(NoMarks):
    """CUDA events on the stream on which the engine computes, the current one."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[Any, Any]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        import torch

        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._events.append((before, after))

    def since(self, first: int) -> list[Mark]:
        origin = self._events[first][0]
        return [
            (origin.elapsed_time(before) * 1e3, before.elapsed_time(after) * 1e3)
            for before, after in self._events[first:]
        ]


def marker() -> NoMarks:
    """Marks of the device of this process."""
    import torch

    return CudaMarks() if torch.cuda.is_available() else NoMarks()
