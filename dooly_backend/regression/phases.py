"""The parts of a batch with times of their own, and what their times are made of.

Attention has two, prefills and decodes; joint.py says what a batch with both takes. What
depends on one number alone has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dooly_backend.regression.models import Training
from dooly_backend.regression.waves import Shape
from dooly_backend.workload import PointKind


@dataclass(frozen=True)
class Phase:
    """A part of a batch with a time of its own.

    `present` is the feature that is above 0 where the batch has this part
    (None: always). `terms` are features that the time is linear in, `bent`
    those of them that may have knees. `coordinates` are where the points lie
    for what the terms leave over (corrected.py): logarithms of a feature
    per another feature, plus an offset. `waves` tells the thread blocks, where they count,
    `switch` the feature by which another kernel may be chosen.
    """

    name: str
    present: str | None
    terms: tuple[str, ...]
    bent: tuple[str, ...]
    coordinates: tuple[tuple[str, str | None, float], ...]
    waves: Shape | None = None
    switch: str | None = None


PHASES: dict[PointKind, tuple[Phase, ...]] = {
    "tokens": (Phase("all", None, ("num_tokens",), ("num_tokens",), (("num_tokens", None, 0.0),)),),
    "requests": (Phase("all", None, ("num_reqs",), ("num_reqs",), (("num_reqs", None, 0.0),)),),
    "routing": (
        Phase(
            "all",
            None,
            ("num_tokens", "experts"),
            ("num_tokens", "experts"),
            (("num_tokens", None, 0.0), ("experts", None, 0.0)),
        ),
    ),
    "batch": (
        Phase(
            "prefills",
            "prefills",
            ("prefills", "prefill_tokens", "prefill_pairs", "prefill_keys"),
            ("prefill_tokens", "prefill_pairs"),
            (
                ("prefill_tokens", None, 0.0),
                ("prefill_query_context", "prefill_tokens", 64.0),
                ("prefills", None, 0.0),
            ),
            Shape("prefill_blocks", "prefill_pairs", "prefill_tokens"),
        ),
        Phase(
            "decodes",
            "decodes",
            ("decodes", "decode_keys", "decode_longest", "decode_beyond"),
            ("decodes", "decode_keys", "decode_longest"),
            (
                ("decodes", None, 0.0),
                # Of all cached tokens, also those outside a window.
                ("decode_context", None, 65.0),
                ("decode_unevenness", None, 0.0),
            ),
            Shape("decode_blocks", "decode_keys", "decodes", divides=True),
            "decodes",
        ),
    ),
}


def phases_of(kind: PointKind) -> tuple[Phase, ...]:
    return PHASES[kind]


def present(data: Training, phase: Phase) -> Any:
    """Of each point, whether it has this phase."""
    if phase.present is None:
        return np.ones(len(data), dtype=bool)
    return data.column(phase.present) > 0


def pure(data: Training, phase: Phase) -> Any:
    """Of each point, whether it has this phase and no other."""
    alone = present(data, phase)
    for other in phases_of(data.kind):
        if other is not phase:
            alone = alone & ~present(data, other)
    return alone
