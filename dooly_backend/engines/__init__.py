"""Serving engines behind one interface; only this package imports them, lazily."""

from __future__ import annotations

import time

from dooly_backend.config import RunOptions
from dooly_backend.engines.base import CapturedCall, Engine
from dooly_backend.errors import InputError

__all__ = ["CapturedCall", "Engine", "boot"]


def boot(options: RunOptions) -> Engine:
    """Start `options.engine` on `options.model` with dummy weights.

    Raises InputError for an engine that Dooly does not know, EngineError when
    it is not installed or refuses the configuration.
    """
    if options.engine == "vllm":
        began = time.monotonic()
        from dooly_backend.engines.vllm import VllmEngine

        engine = VllmEngine.boot(options)
        engine.boot_s = time.monotonic() - began
        return engine
    raise InputError(f"unknown engine {options.engine!r}: use vllm")
