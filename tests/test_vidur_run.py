"""The real Vidur on our exports; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest
import vidur_fixture as fixture
from click.testing import CliRunner

from dooly_backend.errors import InputError
from dooly_backend.exporters import get_exporter
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch
from integration.vidur import run as integration
from shims.vidur.ranges import Layout

if importlib.util.find_spec("vidur") is None:
    pytest.skip("needs Vidur: pip install vidur==0.0.26", allow_module_level=True)

#: Only the PyPI release has compiled parts.
LAYOUT: Layout = "pypi" if importlib.util.find_spec("vidur._native") else "repo"
SMALL = {"max_length": 384, "max_chunk": 256, "max_batch": 4, "granularity": 32}
PREFILL, DECODE = 256, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LatencyModel:
    return fixture.fixture_model(tmp_path_factory.mktemp("vidur") / "latency.db")


@pytest.fixture(scope="module")
def exported(model: LatencyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("vidur") / "out"
    get_exporter("vidur").export([model], out, {"layout": LAYOUT, **SMALL})
    return out


def one_request(export: Path) -> integration.VidurResult:
    return integration.run_vidur(export, 1, prefill_tokens=PREFILL, decode_tokens=DECODE)


def test_one_request_takes_what_the_model_says_and_twice_that(
    model: LatencyModel, exported: Path
) -> None:
    result = one_request(exported)
    prefill = model.step_us(Batch.prefill(PREFILL)) / 1e6
    assert result.ttft_s[0] == pytest.approx(prefill, rel=0.01)
    steps = [model.step_us(Batch.decode(1, PREFILL + n)) / 1e6 for n in range(DECODE - 1)]
    assert result.tpot_s[0] == pytest.approx(sum(steps) / len(steps), rel=0.01)

    fixture.double_times(exported)
    doubled = one_request(exported)
    assert doubled.ttft_s[0] == pytest.approx(2 * result.ttft_s[0], rel=0.01)
    assert doubled.tpot_s[0] == pytest.approx(2 * result.tpot_s[0], rel=0.01)


@dataclass(frozen=True)
class Traced:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def test_requests_of_a_trace_come_as_they_came(model: LatencyModel, tmp_path: Path) -> None:
    get_exporter("vidur").export([model], tmp_path / "out", {"layout": LAYOUT, **SMALL})
    requests = [Traced(5.0, 64, 9), Traced(0.0, 256, 16), Traced(9.0, 128, 1)]  # none meets another
    result = integration.replay(tmp_path / "out", requests, num_blocks=64)
    in_order = sorted(requests, key=lambda request: request.arrival_s)
    assert list(result.decode_tokens) == [request.output_tokens for request in in_order]
    alone = [model.step_us(Batch.prefill(request.prompt_tokens)) / 1e6 for request in in_order]
    assert result.ttft_s == pytest.approx(alone, rel=0.01)


def test_the_command_prints_one_line(model: LatencyModel, tmp_path: Path) -> None:
    get_exporter("vidur").export([model], tmp_path / "out", {"layout": LAYOUT, **SMALL})
    arguments = [str(tmp_path / "out"), "--requests", "8", "--qps", "20", "--json"]
    done = CliRunner().invoke(integration.main, arguments)
    assert done.exit_code == 0, done.output
    assert done.output.count("\n") == 1
    assert '"requests": 8' in done.output
    # Beyond what was exported Vidur has no prediction.
    with pytest.raises(InputError, match="leaves what this export covers"):
        integration.run_vidur(tmp_path / "out", 1, prefill_tokens=380, decode_tokens=40)


def test_an_export_for_the_other_vidur_is_told_apart(model: LatencyModel, tmp_path: Path) -> None:
    other = "repo" if LAYOUT == "pypi" else "pypi"
    get_exporter("vidur").export([model], tmp_path / "out", {"layout": other, **SMALL})
    with pytest.raises(InputError, match=f"export with --layout {LAYOUT}"):
        one_request(tmp_path / "out")


def test_a_folder_that_is_no_export(tmp_path: Path) -> None:
    done = CliRunner().invoke(integration.main, [str(tmp_path)])
    assert done.exit_code == 2
    assert "is no export" in done.output
