"""Calls of a step with their arguments: of modules, and of operations inside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from dooly_backend.engines import CapturedCall, Engine
from dooly_backend.engines.base import copied
from dooly_backend.engines.compiled import StepMode, uninterrupted
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.tracing.modes import acceptable
from dooly_backend.workload import Batch

#: A call by module path and, for an operation, its ordinal in that module's call.
Key = tuple[str, int | None]


class _OperationRecorder(StepMode):
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
        self._keep(func, args, kwargs or {})
        return acceptable(func(*args, **(kwargs or {})))

    def compiled_call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        self._keep(function, args, kwargs)
        return uninterrupted(function, args, kwargs)

    def _keep(self, target: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        call = self._stack.call
        ordinal = self._ordinals.get(call, 0)
        self._ordinals[call] = ordinal + 1
        if (self._stack.path, ordinal) in self._wanted:
            self.calls.append(
                CapturedCall(
                    self._stack.path, target, copied(args), copied(kwargs), None,
                    time.perf_counter_ns(), ordinal,
                )
            )  # fmt: skip


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
