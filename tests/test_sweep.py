"""The points at which a signature is timed, and the batches that show them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from dooly_backend.config import Sweep, load_sweep
from dooly_backend.database.records import Signature
from dooly_backend.profiling.sweep import sweep_points

SMOKE = load_sweep("smoke")


def limited(**limits: int) -> Any:
    return SimpleNamespace(
        **({"max_num_tokens": 512, "max_num_reqs": 8, "max_request_len": 255} | limits)
    )


def keys_of(kind: Any, engine: Any, sweep: Sweep = SMOKE) -> dict[str, str]:
    signature = Signature("x", "module", kind, "{}")
    return {point.key: batch.key for point, batch in sweep_points(signature, sweep, engine)}


def test_points_within_the_limits() -> None:
    assert keys_of("requests", limited()) == {
        "requests=1": "1x1+64",
        "requests=4": "4x1+64",
    }
    assert keys_of("tokens", limited(max_num_tokens=64)) == {
        "tokens=1": "1x1+0",
        "tokens=16": "1x16+0",
        "tokens=64": "1x64+0",
    }
    assert keys_of("constant", limited()) == {"constant": "1x1+0"}
    batches = keys_of("batch", limited())
    assert batches["batch=1x16+64"] == "1x16+64"
    assert "batch=1x16+256" not in batches  # longer than a request may be
    assert "batch=16x1+64" not in batches  # more requests than a step may have


def test_tokens_beyond_a_request_are_several() -> None:
    sweep = Sweep.model_validate(SMOKE.model_dump() | {"tokens": [255, 256, 510]})
    assert keys_of("tokens", limited(), sweep) == {
        "tokens=255": "1x255+0",
        "tokens=256": "1x255+0,1x1+0",
        "tokens=510": "2x255+0",
    }


def test_requests_where_requests_are_short() -> None:
    assert keys_of("requests", limited(max_request_len=17))["requests=4"] == "4x1+16"
