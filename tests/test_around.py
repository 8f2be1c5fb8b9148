"""Steps around prefills of a recorded run, live beside predicted: integration/validate/around."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from integration.validate.around import Timed, main, of_decodes, of_prefills, windows

DECODE_US, PREFILL_US = 10_000.0, 50_000.0
LIVE = Path(__file__).parents[1] / "integration/validate/results/h200-flash_attn-2/live-1.json.xz"


def steps(kinds: str, prefill: float = 1.0, decode: float = 1.0) -> Timed:
    """ "d" for a decode of ten requests, "p" for a prefill; predicted that much too long."""
    is_decode = np.array([kind == "d" for kind in kinds])
    live = np.where(is_decode, DECODE_US, PREFILL_US)
    return Timed(
        np.where(is_decode, 10, 2000),
        np.full(len(kinds), 10),
        is_decode,
        np.ones(len(kinds), dtype=bool),
        live.cumsum(),
        live * np.where(is_decode, decode, prefill),
    )


def test_a_window_is_a_lone_prefill_among_decodes() -> None:
    found = list(windows(steps("dddpdddd" + "dpdpdddd" + "ddppdddd")))
    assert found == [(2000, PREFILL_US + 4 * DECODE_US, PREFILL_US + 4 * DECODE_US, PREFILL_US)]


def test_what_is_too_long_of_the_prefills() -> None:
    table = of_prefills(steps("dddpdddd" * 5, prefill=1.1))
    (row,) = table.to_dict("records")
    assert row["windows"] == 5
    assert row["live_ms"] == pytest.approx(90)
    assert row["too_long_percent"] == pytest.approx(100 * 0.1 / 1.1)


def test_decodes_by_how_far_they_are_behind_a_prefill() -> None:
    table = of_decodes(steps(("p" + "d" * 20) * 5, decode=0.9))
    assert list(table["size"]) == [10, 20, 40, 25]  # behind 2, 4, 8 and 16 steps
    assert table["median"].to_numpy() == pytest.approx(0.9)


def test_a_recorded_run_whose_clock_gives_way() -> None:
    command = ["meta-llama/Llama-3.1-8B", "--backend", "FLASH_ATTN", str(LIVE), "--device-clock"]
    told = CliRunner().invoke(main, command, catch_exceptions=False).output
    rows = [line.split() for line in told.splitlines() if line.startswith("[2500, 4000)")]
    assert len(rows) == 1
    assert abs(float(rows[0][-1])) < 10  # percent
