"""Options of the SGLang Simulator export, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from dooly_backend.errors import InputError

from ..common import known_options, whole_number

Predictor = Literal["ml", "replay"]
PREDICTORS: tuple[Predictor, ...] = ("ml", "replay")
#: Enough for its 70 coefficients; more changes the held-out error by less than a tenth.
SAMPLES = 1200
_FEWEST_SAMPLES = 200

HELP: Mapping[str, str] = {
    "predictor": "'ml' or 'replay' (default: both)",
    "samples": f"steps that the ml model is fitted to and tested on (default {SAMPLES})",
    "seed": "of the sampled steps (default 0)",
    "max_tokens": "most tokens of one step (default: what was measured)",
    "max_seqs": "most requests of one step (default: what was measured)",
    "max_length": "longest request, tokens (default: what was measured)",
    "hardware": "memory_gb, devices_per_node (default: the shipped description)",
}
_NUMBERS = ("max_tokens", "max_seqs", "max_length")


@dataclass(frozen=True)
class SGLangOptions:
    """What the user chose; None of a number: take what was measured."""

    predictors: tuple[Predictor, ...] = PREDICTORS
    samples: int = SAMPLES
    seed: int = 0
    max_tokens: int | None = None
    max_seqs: int | None = None
    max_length: int | None = None
    hardware: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> SGLangOptions:
        """Options by name; numbers may be text. Raises InputError."""
        given = known_options(options, HELP, "the SGLang Simulator export")
        predictor = given.pop("predictor", None)
        if predictor is not None and predictor not in PREDICTORS:
            raise InputError(f"predictor must be {' or '.join(PREDICTORS)}, not {predictor!r}")
        hardware = given.get("hardware")
        if hardware is not None and not isinstance(hardware, Mapping):
            raise InputError("hardware must be a mapping (memory_gb, devices_per_node)")
        for name in _NUMBERS:
            if name in given:
                given[name] = whole_number(name, given[name], smallest=2)
        if "samples" in given:
            given["samples"] = whole_number("samples", given["samples"], _FEWEST_SAMPLES)
        if "seed" in given:
            given["seed"] = whole_number("seed", given["seed"], smallest=0)
        chosen = PREDICTORS if predictor is None else (cast(Predictor, predictor),)
        return cls(predictors=chosen, **given)
