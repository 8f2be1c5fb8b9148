"""The export benchmark runs, on fewer models than it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from integration.benchmarks import export


def test_the_benchmark_writes_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MODELS", export.MODELS[:1])
    out = tmp_path / "results" / "export.json"
    arguments = ["--to", "vidur", "--to", "revati", "-o", str(out)]
    done = CliRunner().invoke(export.main, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert result["byte_identical"]
    assert set(result["cpu_seconds"]) == {"read", "vidur", "revati"}


def test_a_limit_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MODELS", export.MODELS[:1])
    done = CliRunner().invoke(export.main, ["--to", "revati", "--limit", "0"])
    assert done.exit_code != 0
    assert "more than 0 s" in str(done.exception)
