"""Triton kernels that code launches by itself, past torch's dispatcher: shown to the tracer.

The sampler of vLLM's V2 runner launches such kernels between operations that
the dispatcher sees. Every launch of a jitted function goes through its `run`,
an autotuned one through its tuner's, which is replaced while a step is traced.
Inside an operation of the dispatcher no mode is on, so that what its kernels
are launched by is not shown: the operation is a call of its own. Code that
Inductor has compiled launches its kernels by itself, and is one call as well
(`engines/compiled.py`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

from dooly_backend.engines.compiled import StepMode

#: Triton's classes whose `run` launches: by module, which another triton may not have.
_LAUNCHERS = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.interpreter", "InterpretedFunction"),
    ("triton.runtime.autotuner", "Autotuner"),
)


@contextmanager
def showing_launches() -> Iterator[None]:
    """Show the launches of Triton's kernels to the `StepMode` that is on, while the block runs.

    Where triton is absent, or nothing has imported it, there are none.
    """
    shown = _Launches()
    with ExitStack() as undo:
        for module, name in _LAUNCHERS:
            launcher = getattr(sys.modules.get(module), name, None)
            if launcher is not None:
                undo.callback(setattr, launcher, "run", launcher.run)
                launcher.run = shown.of(launcher.run)
        yield


class _Launches:
    """Which launch is running: what a tuner tries belongs to the tuner's own."""

    def __init__(self) -> None:
        self._running = False

    def of(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` of a launcher, shown where it launches and no other launch is running."""

        @functools.wraps(run)
        def call(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            mode = _get_current_dispatch_mode()
            # A launch that only warms up compiles the kernel, and runs nothing.
            if self._running or kwargs.get("warmup") or not isinstance(mode, StepMode):
                return run(kernel, *args, **kwargs)
            mode.launched(kernel_name(kernel))
            self._running = True
            try:
                return run(kernel, *args, **kwargs)
            finally:
                self._running = False

        return call


def kernel_name(kernel: Any) -> str:
    """Name of the function that was jitted, below its tuners and heuristics."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", type(kernel).__name__))
