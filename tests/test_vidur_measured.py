"""The real Vidur on exports of measured models: four architectures, one device and two.

The release of PyPI where it is installed, as CI has it, and the clone of
microsoft/vidur that VIDUR_REPO names.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measured
import pytest
from vidur_fixture import double_times

from dooly_backend.exporters import get_exporter
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch
from integration.vidur import run as integration
from shims.vidur.costs import StepCosts
from shims.vidur.model import dimensions_of
from shims.vidur.options import VidurOptions
from shims.vidur.ranges import Layout, choose_ranges
from shims.vidur.rules import VidurRules
from shims.vidur.tables import build_tables

SMALL = {"max_length": 320, "max_chunk": 256, "max_batch": 2}
PREFILL, DECODE = 256, 16
CHECKOUT = os.environ.get(integration.CHECKOUT_VARIABLE)


@dataclass(frozen=True)
class Simulator:
    layout: Layout
    checkout: Path | None

    def one_request(self, export: Path, degree: int) -> integration.VidurResult:
        return integration.run_vidur(
            export,
            1,
            prefill_tokens=PREFILL,
            decode_tokens=DECODE,
            checkout=self.checkout,
            extra=["--replica_config_tensor_parallel_size", str(degree)],
        )


@pytest.fixture(scope="module", params=("pypi", "repo"))
def simulator(request: pytest.FixtureRequest) -> Simulator:
    if request.param == "pypi":
        if importlib.util.find_spec("vidur") is None:
            pytest.skip("needs Vidur: pip install vidur==0.0.26")
        return Simulator("pypi", None)
    if not CHECKOUT:
        pytest.skip(
            f"needs microsoft/vidur: set {integration.CHECKOUT_VARIABLE} to a clone of "
            "https://github.com/microsoft/vidur"
        )
    return Simulator("repo", Path(CHECKOUT))


def by_its_rules(
    models: tuple[LatencyModel, ...], layout: Layout, degree: int, batch: Batch
) -> float:
    """Seconds of a step, as `VidurRules` adds up the export's rows."""
    costs = [StepCosts(model) for model in models]
    configuration = models[0].configuration
    dimensions = dimensions_of(configuration, models[0].occurrences)
    options = VidurOptions.parse({"layout": layout, **SMALL})
    ranges = choose_ranges(costs[0], options, layout)
    tables = build_tables(costs, dimensions, ranges, layout)
    rules = VidurRules(tables, layout, ranges.granularity, configuration.num_layers, degree)
    return rules.step_ms(batch) / 1e3


def export(name: str, layout: Layout, out: Path) -> dict[str, Any]:
    return get_exporter("vidur").export(measured.models(name), out, {"layout": layout, **SMALL})


@pytest.mark.parametrize("name", measured.SMALL)
def test_a_request_takes_what_was_measured(simulator: Simulator, name: str, tmp_path: Path) -> None:
    manifest = export(name, simulator.layout, tmp_path / "out")
    assert manifest["tensor_parallel"] == [1, 2]
    assert abs(manifest["conservation"]["decode"]["worst_percent"]) < 1
    models = measured.models(name)
    for model in models:
        degree = model.configuration.tensor_parallel
        result = simulator.one_request(tmp_path / "out", degree)
        batch = Batch.prefill(PREFILL)
        rules = by_its_rules(models, simulator.layout, degree, batch)
        assert result.ttft_s[0] == pytest.approx(rules, rel=0.01)
        assert result.ttft_s[0] == pytest.approx(model.step_us(batch) / 1e6, rel=0.01)
        steps = [model.step_us(Batch.decode(1, PREFILL + n)) / 1e6 for n in range(DECODE - 1)]
        assert result.tpot_s[0] == pytest.approx(sum(steps) / len(steps), rel=0.01)


def test_twice_in_is_twice_out(simulator: Simulator, tmp_path: Path) -> None:
    export(measured.GEMMA2, simulator.layout, tmp_path / "out")
    before = simulator.one_request(tmp_path / "out", 2)
    double_times(tmp_path / "out")
    after = simulator.one_request(tmp_path / "out", 2)
    assert after.ttft_s[0] == pytest.approx(2 * before.ttft_s[0], rel=0.01)
    assert after.tpot_s[0] == pytest.approx(2 * before.tpot_s[0], rel=0.01)
