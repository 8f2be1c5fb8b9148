"""Ranges of torch's profiler around the calls of a runnable set, in a live step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch.nn.modules.module as torch_module
from torch.profiler import record_function

from dooly_backend.engines import Engine
from dooly_backend.engines.base import hooks
from dooly_backend.engines.compiled import StepMode, uninterrupted
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.operations.runnable import Entry
from dooly_backend.tracing.modes import acceptable
from integration.gpu.launches import ENTRY, MODULE


class EntryRanges(StepMode):
    """Opens "dooly#i" while the call of entry i runs, and "dooly@path" while a module does.

    Calls are found as `operations.capture` finds them: modules by the path under
    which they run, operations by their ordinal in the module's call.
    """

    def __init__(self, engine: Engine, entries: Sequence[Entry]) -> None:
        super().__init__()
        self._stack = ModuleStack(engine.modules)
        self._numbers = {entry.key: i for i, entry in enumerate(entries)}
        self._ordinals: dict[int | None, int] = {}
        self._open: list[list[record_function]] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Open the ranges while the block runs."""
        with self._stack.tracking():
            # After the stack's own hooks, so that the path is that of the module which starts.
            handles = [
                torch_module.register_module_forward_pre_hook(self._enter),
                torch_module.register_module_forward_hook(self._leave, always_call=True),
            ]
            with hooks(handles), self:
                yield

    def _enter(self, module: Any, args: Any) -> None:
        path = self._stack.path
        names = [f"{MODULE}{path}"]
        if (number := self._numbers.get((path, None))) is not None:
            names.append(f"{ENTRY}{number}")
        opened = [record_function(name) for name in names]
        for one in opened:
            one.__enter__()
        self._open.append(opened)

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        for one in reversed(self._open.pop()):
            one.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "profiler":  # what opens and closes the ranges
            return func(*args, **(kwargs or {}))
        with self._range():
            return acceptable(func(*args, **(kwargs or {})))

    def compiled_call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        with self._range():
            return uninterrupted(function, args, kwargs)

    def _range(self) -> AbstractContextManager[Any]:
        """The range of the entry whose call comes next, if it is one's."""
        call = self._stack.call
        ordinal = self._ordinals.get(call, 0)
        self._ordinals[call] = ordinal + 1
        number = self._numbers.get((self._stack.path, ordinal))
        return nullcontext() if number is None else record_function(f"{ENTRY}{number}")
