"""Sweeps beside each other: what each predicts of points that none of them has."""

from __future__ import annotations

import csv
import lzma
from pathlib import Path

import pytest
from click.testing import CliRunner
from sample_records import ATTENTION, LINEAR, at, store

from dooly_backend.database import Database
from dooly_backend.errors import InputError
from integration.cost.held_out import compared, main, measured


def curve(*tokens: int, factor: float = 1.0) -> list[object]:
    return [at(f"tokens={n}", factor * (10.0 + n / 8)) for n in tokens]


def database(path: Path, points: dict[object, list[object]]) -> Path:
    with Database.open(path, create=True) as made:
        store(made, points)
    return path


def test_only_what_no_sweep_has_is_held_out(tmp_path: Path) -> None:
    scan = database(tmp_path / "scan.db", {LINEAR: curve(8, 24, 100, 300)})
    fine = database(tmp_path / "fine.db", {LINEAR: curve(1, 8, 16, 64, 128, 256, 512)})
    off = database(tmp_path / "off.db", {LINEAR: curve(1, 512, factor=1.2)})
    packed = tmp_path / "fine.db.xz"
    packed.write_bytes(lzma.compress(fine.read_bytes()))
    result = CliRunner().invoke(main, [str(scan), str(packed), str(off), "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    with (tmp_path / "held-out.csv").open() as file:
        good, wrong = csv.DictReader(file)
    assert (good["points"], good["database"], good["measured"]) == ("tokens", "fine.db.xz", "7")
    assert good["held_out"] == wrong["held_out"] == "3"  # 8 tokens are in a sweep
    assert float(good["mean_percent"]) < 0.1
    assert float(wrong["bias_percent"]) == pytest.approx(20, abs=0.5)


def test_short_calls_are_rows_of_their_own() -> None:
    truth = {LINEAR: curve(24, 100), ATTENTION: [at("batch=1x20+0", 3.0)]}
    sweep = {LINEAR: curve(1, 8, 16, 64, 128, 512),
             ATTENTION: [at(f"batch=1x{n}+0", 2.0) for n in (8, 16, 32, 64)]}  # fmt: skip
    prefill, tokens = compared(truth, {"x": sweep})  # type: ignore[dict-item]
    assert prefill["points"] == "batch: prefill, below 5 us"
    assert prefill["mean_percent"] == pytest.approx(33.3, abs=0.1)
    assert (tokens["points"], tokens["held_out"]) == ("tokens", 2)


def test_sweeps_of_other_signatures_cannot_be_compared(tmp_path: Path) -> None:
    scan = database(tmp_path / "scan.db", {LINEAR: curve(8)})
    other = database(tmp_path / "other.db", {ATTENTION: [at("batch=1x8+0", 5.0)]})
    with pytest.raises(InputError, match="measured nothing that the scan has"):
        compared(measured(str(scan)), {"other.db": measured(str(other))})
