"""The quickstart from the engine to Vidur's figures; the engine is the tests' own."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
if importlib.util.find_spec("vidur") is None:
    pytest.skip("needs Vidur: pip install vidur==0.0.26", allow_module_level=True)

from dooly_backend.config import RunOptions
from dooly_backend.database import Database
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.regression.latency import LatencyModel
from integration import quickstart


def cell(output: str, name: str) -> str:
    """What the table says of `name`."""
    match = re.search(rf"│ {name} +│ (.*?) +│$", output, re.MULTILINE)
    assert match, output
    return match.group(1)


def test_a_first_and_a_second_run(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunOptions] = []

    @contextmanager
    def running(options: RunOptions) -> Iterator[VllmEngine]:
        asked.append(options)
        yield engine

    monkeypatch.setattr(quickstart, "running_engine", running)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)

    first = CliRunner().invoke(quickstart.quickstart, ["--sweep", "smoke"])
    assert first.exit_code == 0, first.output
    assert asked[0].model.name == "HuggingFaceTB/SmolLM-135M"
    assert cell(first.output, "model") == "HuggingFaceTB/SmolLM-135M, 30 layers"
    assert cell(first.output, "signatures") == "0 known, 12 new"
    points = re.match(r"(\d+) new, in \d+ s", cell(first.output, "points measured"))
    assert points
    assert cell(first.output, "database") == "latency.db"
    with Database.open("latency.db", read_only=True) as database:
        assert database.info().measurements == int(points[1])
        assert LatencyModel.load(database).step_cost is not None
    for name in ("Vidur's TTFT", "Vidur's TPOT"):
        figures = cell(first.output, name)
        values = [float(number) for number in re.findall(r"\d+\.\d", figures)]
        assert min(values) > 0, figures
        assert figures.endswith("ms (20 requests)")
    manifest = json.loads((tmp_path / "quickstart" / "vidur" / "manifest.json").read_text())
    assert manifest["model"] == "HuggingFaceTB/SmolLM-135M"

    second = CliRunner().invoke(quickstart.quickstart, ["--sweep", "smoke"])
    assert second.exit_code == 0, second.output
    assert cell(second.output, "signatures") == "12 known, 0 new"
    assert cell(second.output, "points measured").startswith("none: the database knows")
    # The same table of the same database: Vidur's figures are the same, too.
    assert cell(second.output, "Vidur's TTFT") == cell(first.output, "Vidur's TTFT")


def test_an_unknown_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dooly_backend import console

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["quickstart", "smollm-135n"])
    assert console.exit_code(quickstart.quickstart, "quickstart") == 2
    assert not list(tmp_path.iterdir())
