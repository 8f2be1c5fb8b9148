"""How long the forward pass of a live step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dooly_backend.engines import Engine
from dooly_backend.profiling.timer import Timer
from dooly_backend.workload import Batch

Hook = Callable[..., None]


class ForwardClock:
    """Times of the model's forward pass inside live steps.

    On a GPU the device is kept busy while the host launches, so that the time
    between the events is the kernels', whatever the host takes: asleep before a
    short pass, multiplying matrices before one of `_HEAVY` tokens or more, since the
    clock gives way to a stream of such passes. Experts wait for their weights and draw
    less power than such products: a model with experts is never kept busy with them.
    How long the host launches depends on the layers, the backend and the minute. A
    pass that the device begins before all of it is launched holds waiting for the
    host: it is not kept, `exposed` counts it, and the next one finds the device busy
    for twice as long.
    """

    _SLEEP_CYCLES = 50_000_000  # 25 ms at 2 GHz: longer than the host launches four layers
    _HEAVY = 512
    _PRODUCTS = 25  # of 8192 x 8192 matrices: 1.5 ms each on an H200

    def __init__(self, engine: Engine, timer: Timer, batch: Batch) -> None:
        self._engine = engine
        self._timer = timer
        self._on_gpu = engine.environment.device_kind == "cuda"
        self._is_heavy = batch.num_tokens >= self._HEAVY and not engine.moe
        self._longer = 1
        self.times_us: list[float] = []
        self.exposed = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        model = self._engine.modules[""]
        before, after = self._events() if self._on_gpu else self._wall()
        handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _wall(self) -> tuple[Hook, Hook]:
        start = 0

        def before(*_: object) -> None:
            nonlocal start
            start = time.perf_counter_ns()

        def after(*_: object) -> None:
            self.times_us.append((time.perf_counter_ns() - start) / 1000)

        return before, after

    def _events(self) -> tuple[Hook, Hook]:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        factor = torch.randn(8192, 8192, device="cuda").bfloat16() if self._is_heavy else None

        def before(*_: object) -> None:
            if factor is None:
                torch.cuda._sleep(self._longer * self._SLEEP_CYCLES)
            else:
                for _product in range(self._longer * self._PRODUCTS):
                    torch.mm(factor, factor)
                self._timer.flush()
            start.record()

        def after(*_: object) -> None:
            end.record()
            exposed = start.query()
            end.synchronize()
            if exposed:
                self.exposed += 1
                self._longer *= 2
            else:
                self.times_us.append(start.elapsed_time(end) * 1000)

        return before, after
