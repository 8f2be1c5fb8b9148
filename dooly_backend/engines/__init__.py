"""Serving engines behind one interface; only this package imports them, lazily."""

from __future__ import annotations

import time
from collections.abc import Callable

from dooly_backend.config import RunOptions
from dooly_backend.engines.base import CapturedCall, Engine
from dooly_backend.errors import InputError

__all__ = ["CapturedCall", "Engine", "boot"]


def _nothing() -> None:
    return None


def boot(options: RunOptions, before_device: Callable[[], object] = _nothing) -> Engine:
    """Start `options.engine` on `options.model` with dummy weights.

    `before_device` is called when everything is prepared that needs no device: what
    takes longest, of an engine of few layers. How long it takes is no part of `boot_s`.
        Raises InputError for an engine that Dooly does not know, EngineError when
    it is not installed or refuses the configuration.
    """
    if options.engine == "vllm":
        began, waited_s = time.monotonic(), 0.0

        def prepared() -> None:
            nonlocal waited_s
            begins = time.monotonic()
            before_device()
            waited_s = time.monotonic() - begins

        from dooly_backend.engines.vllm import VllmEngine

        engine = VllmEngine.boot(options, prepared)
        engine.boot_s = time.monotonic() - began - waited_s
        return engine
    raise InputError(f"unknown engine {options.engine!r}: use vllm")
