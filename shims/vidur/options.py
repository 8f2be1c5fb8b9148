"""Options of the Vidur export, checked."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from dooly_backend.errors import InputError

from .ranges import LAYOUTS, Layout

HELP: Mapping[str, str] = {
    "layout": "'repo' for microsoft/vidur, 'pypi' for vidur 0.0.26 (default repo)",
    "max_length": "longest request, tokens (default: what was measured)",
    "max_chunk": "most prefill tokens of one step (default: what was measured)",
    "max_batch": "most requests of one step (default: what was measured)",
    "granularity": "step of KV lengths, a power of two (default: the finest that stays quick)",
    "num_blocks": "KV-cache blocks of one replica (default: from the device's memory)",
    "hardware": "fp16_tflops, memory_gb, devices_per_node (default: the shipped description)",
}
_NUMBERS = ("max_length", "max_chunk", "max_batch", "granularity", "num_blocks")


@dataclass(frozen=True)
class VidurOptions:
    """What the user chose; None of a number: take what was measured."""

    layout: Layout = "repo"
    hardware: Mapping[str, Any] | None = None
    max_length: int | None = None
    max_chunk: int | None = None
    max_batch: int | None = None
    granularity: int | None = None
    num_blocks: int | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> VidurOptions:
        """Options by name; numbers may be text. Raises InputError."""
        for name in options:
            if name not in HELP:
                close = difflib.get_close_matches(name, HELP, n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise InputError(
                    f"the Vidur export has no option {name!r}: {hint}known are {', '.join(HELP)}"
                )
        given = {name: value for name, value in options.items() if value is not None}
        layout = given.get("layout", "repo")
        if layout not in LAYOUTS:
            raise InputError(f"layout must be {' or '.join(LAYOUTS)}, not {layout!r}")
        hardware = given.get("hardware")
        if hardware is not None and not isinstance(hardware, Mapping):
            raise InputError("hardware must be a mapping (fp16_tflops, memory_gb, ...)")
        numbers = {name: _positive(name, given[name]) for name in _NUMBERS if name in given}
        step = numbers.get("granularity", 1)
        if step & (step - 1):
            raise InputError(f"granularity must be a power of two, not {step}")
        return cls(cast(Layout, layout), hardware, **numbers)


def _positive(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(value, (bool, float)):
        raise InputError(f"{name} must be a whole number above zero, not {value!r}")
    return number
