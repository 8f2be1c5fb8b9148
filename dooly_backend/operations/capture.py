"""Calls of a step with their arguments: of modules, and of operations inside them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from dooly_backend.engines import CapturedCall, Engine
from dooly_backend.engines.base import copied
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.tracing.modes import acceptable
from dooly_backend.workload import Batch

#: A call by module path and, for an operation, its ordinal in that module's call.
Key = tuple[str, int | None]


class _OperationRecorder(TorchDispatchMode):
    """Keeps the arguments of the wanted operations."""

    def __init__(self, stack: ModuleStack, wanted: frozenset[Key]) -> None:
        super().__init__()
        self._stack = stack
        self._wanted = wanted
        self._ordinals: dict[int | None, int] = {}
        self.calls: list[CapturedCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = self._stack.call
        ordinal = self._ordinals.get(call, 0)
        self._ordinals[call] = ordinal + 1
        if (self._stack.path, ordinal) in self._wanted:
            self.calls.append(
                CapturedCall(
                    self._stack.path, func, copied(args), copied(kwargs or {}), None,
                    time.perf_counter_ns(), ordinal,
                )
            )  # fmt: skip
        return acceptable(func(*args, **(kwargs or {})))


@contextmanager
def captured(engine: Engine, batch: Batch, keys: Collection[Key]) -> Iterator[list[CapturedCall]]:
    """Run one step of `batch` and yield the calls named by `keys`, in their order.

    The calls can be repeated inside the `with` block. Raises EngineError when
    the batch does not fit.
    """
    paths = {path for path, ordinal in keys if ordinal is None}
    wanted = frozenset(key for key in keys if key[1] is not None)
    with ExitStack() as stack:
        if not wanted:
            yield stack.enter_context(engine.capture(batch, paths))
            return
        modules = ModuleStack(engine.modules)
        recorder = _OperationRecorder(modules, wanted)
        with modules.tracking(), recorder:
            calls = stack.enter_context(engine.capture(batch, paths))
        yield sorted([*calls, *recorder.calls], key=lambda call: call.moment)
