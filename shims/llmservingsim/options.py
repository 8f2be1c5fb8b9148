"""Options of the LLMServingSim export, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dooly_backend.errors import InputError

from ..common import known_options, whole_number

#: The bundled RTX PRO 6000 attention.csv has 19,364 rows.
MAX_ROWS = 50_000

HELP: Mapping[str, str] = {
    "hardware": "memory_gb, memory_bandwidth_gbs, interconnect (default: the shipped description)",
    "hardware_name": "name of the device's folder of profiles (default: from the device)",
    "variant": "name of the dtypes' folder (default: from the dtypes, as the simulator does)",
    "max_tokens": "most tokens of one step (default: what was measured)",
    "max_seqs": "most requests of one step (default: what was measured)",
    "max_kv": "longest history and context, tokens (default: what was measured)",
    "max_rows": f"about how many rows attention.csv may have (default {MAX_ROWS})",
}
_NUMBERS = ("max_tokens", "max_seqs", "max_kv", "max_rows")


@dataclass(frozen=True)
class LLMServingSimOptions:
    """What the user chose; None of a number: take what was measured."""

    hardware: Mapping[str, Any] | None = None
    hardware_name: str | None = None
    variant: str | None = None
    max_tokens: int | None = None
    max_seqs: int | None = None
    max_kv: int | None = None
    max_rows: int = MAX_ROWS

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> LLMServingSimOptions:
        """Options by name; numbers may be text. Raises InputError."""
        given = known_options(options, HELP, "the LLMServingSim export")
        hardware = given.get("hardware")
        if hardware is not None and not isinstance(hardware, Mapping):
            raise InputError("hardware must be a mapping (memory_gb, memory_bandwidth_gbs, ...)")
        for name in ("hardware_name", "variant"):
            if name in given and not re.fullmatch(r"\w[\w.-]*", str(given[name])):
                raise InputError(f"{name} must be the name of a folder, not {given[name]!r}")
        numbers = {name: whole_number(name, given[name]) for name in _NUMBERS if name in given}
        return cls(**{**given, **numbers})
