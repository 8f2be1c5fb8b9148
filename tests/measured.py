"""Really measured databases that tests of exports use: data/cpu.db and builtin:h200."""

from __future__ import annotations

import functools
from pathlib import Path

from dooly_backend.database import Database
from dooly_backend.regression.latency import LatencyModel
from integration.packed import unpacked

CPU = unpacked(Path(__file__).resolve().parent / "data" / "cpu.db")
H200 = "builtin:h200"

LLAMA, QWEN3, GEMMA2, MIXTRAL = "small-llama", "small-qwen3", "small-gemma2", "small-mixtral"
#: A dense model, one with QK-norm, one with a sliding window, one with experts.
SMALL = (LLAMA, QWEN3, GEMMA2, MIXTRAL)
#: Of the H200: full attention, and sliding-window layers among full ones.
LARGE = ("meta-llama/Llama-3.1-8B", "CohereLabs/c4ai-command-r7b-12-2024")


@functools.cache
def models(name: str) -> tuple[LatencyModel, ...]:
    """The model at every degree that was measured."""
    small = name in SMALL
    degrees, backend = ((1, 2), None) if small else ((1,), "FLASH_ATTN")
    with Database.open(str(CPU) if small else H200, read_only=True) as database:
        return tuple(
            LatencyModel.load(database, name, backend=backend, tensor_parallel=degree)
            for degree in degrees
        )
