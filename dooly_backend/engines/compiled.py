"""Functions of the engine that torch.compile has compiled: one call each, never opened.

vLLM compiles some small functions even where the model runs eagerly (Cohere's
layer norm, `vllm/model_executor/models/commandr.py`). Their kernels are Triton's
and bypass the dispatcher. A dispatch mode that torch does not know to ignore
makes such a function run eagerly, and for good: dynamo never compiles a frame
again that it has once skipped (`catch_errors` of `torch/_dynamo/convert_frame.py`).
What would be traced and timed then is not what the engine runs.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

#: What the names of such calls begin with, as those of operations do with their library.
NAMESPACE = "compiled"


class StepMode(TorchDispatchMode):
    """A dispatch mode for live steps: compiled functions stay so, and are shown to it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @abstractmethod
    def compiled_call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Called in the place of compiled `function`: the result of calling it with no mode on."""

    def launched(self, kernel: str) -> None:
        """Called before `kernel` is launched past the dispatcher (`engines/launches.py`)."""


def uninterrupted(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Call a compiled function with all modes off."""
    with _disable_current_modes():
        if not torch._C._len_torch_function_stack():
            return function(*args, **kwargs)
        with _pop_mode_temporarily():
            return function(*args, **kwargs)


def shown(compiled: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`compiled`, whose calls a `StepMode` sees where one is on."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a larger function, of which this one is a part
            return compiled(*args, **kwargs)
        mode = _get_current_dispatch_mode()
        if isinstance(mode, StepMode):
            return mode.compiled_call(f"{NAMESPACE}::{name}", compiled, args, kwargs)
        return compiled(*args, **kwargs)

    return call


@contextmanager
def showing_compiled(package: str) -> Iterator[None]:
    """Show the functions of `package` that are compiled meanwhile, by decorators of its modules."""
    make = torch.compile

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **options)
        made = make(model, **options)
        if not _is_of(model, package):
            return made
        return shown(made, f"{model.__module__.rpartition('.')[2]}_{model.__name__}")

    torch.compile = compile  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = make


def _is_of(model: Any, package: str) -> bool:
    """Whether it is a function of a module of `package`; methods are left alone."""
    return (
        isinstance(model, FunctionType)
        and model.__module__.split(".")[0] == package
        and model.__qualname__ == model.__name__
    )
