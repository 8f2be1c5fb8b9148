"""Which module is running: a stack of paths kept by torch's global module hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dooly_backend.engines.base import hooks

OUTSIDE = "(step)"


class ModuleStack:
    """Paths of the modules entered and not yet left.

    A module that several parents share (the rotary embedding of every layer)
    is named after the parent that calls it, since `named_modules` lists it
    only once.
    """

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self._names = {id(module): path for path, module in modules.items()}
        self._stack: list[tuple[str, Any]] = []
        #: Every call so far, in order: (path, class, index of the calling module's call).
        self.entered: list[tuple[str, str, int | None]] = []
        self._calls: list[int] = []

    @property
    def path(self) -> str:
        """Path of the running module ("" is the model itself); `OUTSIDE` when none runs."""
        return self._stack[-1][0] if self._stack else OUTSIDE

    @property
    def call(self) -> int | None:
        """Index in `entered` of the running call; None outside every module."""
        return self._calls[-1] if self._calls else None

    def path_of(self, module: Any) -> str:
        """Path under which `module` would run if it were called now."""
        if self._stack:
            parent_path, parent = self._stack[-1]
            prefix = f"{parent_path}." if parent_path else ""
            for name, child in parent.named_modules():
                if child is module and name:
                    return prefix + name
        return self._names.get(id(module), type(module).__name__)

    @contextmanager
    def tracking(self) -> Iterator[ModuleStack]:
        """Keep the stack while the `with` block runs."""
        import torch.nn.modules.module as torch_module

        def enter(module: Any, args: Any) -> None:
            self._stack.append((self.path_of(module), module))
            self.entered.append((self.path, type(module).__name__, self.call))
            self._calls.append(len(self.entered) - 1)

        def leave(module: Any, args: Any, output: Any) -> None:
            # Returns None: any other value would replace the module's output.
            self._stack.pop()
            self._calls.pop()

        handles = [
            torch_module.register_module_forward_pre_hook(enter),
            torch_module.register_module_forward_hook(leave, always_call=True),
        ]
        with hooks(handles):
            try:
                yield self
            finally:
                self._stack.clear()
                self._calls.clear()
