"""The adaptive sweep on a real engine: what it leaves in the database, and what reads it."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path

import pytest

pytest.importorskip("torch")

from test_profile import QUICK, Stopping, measured

from dooly_backend.config import AdaptiveSweep
from dooly_backend.database import Database
from dooly_backend.engine_commands import _plan_summary
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.profiling.adaptive import needs
from dooly_backend.profiling.plan import Known, Plan, plan
from dooly_backend.profiling.profiler import profile
from dooly_backend.profiling.rounds import evidence
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch
from shims.vidur.costs import StepCosts
from shims.vidur.model import dimensions_of
from shims.vidur.options import VidurOptions
from shims.vidur.ranges import choose_ranges
from shims.vidur.rules import VidurRules
from shims.vidur.tables import build_tables

SWEEP = AdaptiveSweep(
    name="test", target=0.25, tokens=256, requests=16, context=256, points=10, held_out=2
)


@pytest.fixture(scope="module")
def measured_once(engine: VllmEngine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adaptive") / "latency.db"
    with Database.open(path, create=True) as database:
        result = profile(engine, database, SWEEP, QUICK)
    assert result.points == len(measured(path))
    assert (result.signatures_new, result.signatures_known) == (12, 0)
    return path


@pytest.fixture
def path(measured_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(measured_once, tmp_path / "latency.db"))


def planned(engine: VllmEngine, path: Path, sweep: AdaptiveSweep) -> Plan:
    with Database.open(path, read_only=True) as database:
        return plan(engine, Known(database), sweep)


def test_every_signature_is_known_afterwards(engine: VllmEngine, path: Path) -> None:
    with Database.open(path, read_only=True) as database:
        (environment_id,) = database.environments()
        for signature in database.signatures().values():
            known = evidence(engine, database, environment_id, signature)
            assert needs(known, SWEEP) == []
            assert len(known.measurements) <= 4 * SWEEP.points
    summary = _plan_summary(planned(engine, path, SWEEP))
    assert (summary["known"], summary["new"], summary["points"]) == (12, 0, 0)


def test_a_second_run_measures_nothing(engine: VllmEngine, path: Path) -> None:
    found = measured(path)
    with Database.open(path) as database:
        result = profile(engine, database, SWEEP, QUICK)
    assert (result.points, result.signatures_new, result.signatures_known) == (0, 0, 12)
    assert measured(path) == found


def test_a_wider_range_measures_only_the_rest(engine: VllmEngine, path: Path) -> None:
    found = measured(path)
    wider = SWEEP.model_copy(update={"requests": 32})
    most = planned(engine, path, wider)
    with Database.open(path) as database:
        result = profile(engine, database, wider, QUICK)
    later = measured(path)
    assert {key: later[key] for key in found} == found
    fresh = [key for _, key in later.keys() - found.keys()]
    assert any(key == "requests=32" for key in fresh)
    assert not any(key.startswith("tokens") for key in fresh)
    # Sampler, logits and attention depend on the requests.
    assert (result.signatures_new, most.new) == (3, 3)
    assert 0 < result.points <= most.points
    assert most.at_most


def test_an_interrupted_run_is_continued(engine: VllmEngine, tmp_path: Path) -> None:
    path = tmp_path / "latency.db"
    sweep = SWEEP.model_copy(update={"tokens": 64, "requests": 4, "context": 64})
    with Database.open(path, create=True) as database, pytest.raises(KeyboardInterrupt):
        profile(engine, database, sweep, QUICK, Stopping(after=7))
    found = measured(path)
    assert len(found) == 7
    with Database.open(path) as database:
        result = profile(engine, database, sweep, QUICK)
    later = measured(path)
    assert result.points == len(later) - 7
    assert {key: later[key] for key in found} == found


def test_vidurs_tables_add_up_to_the_step(path: Path) -> None:
    """Off the grid that other sweeps measure, too, the export is what the database says."""
    with Database.open(path, read_only=True) as database:
        model = LatencyModel.load(database)
    costs = StepCosts(model)
    ranges = choose_ranges(costs, VidurOptions(), "pypi")
    assert (ranges.max_chunk, ranges.max_batch) == (256, 16)
    dimensions = dimensions_of(model.configuration, model.occurrences)
    tables = build_tables([costs], dimensions, ranges, "pypi")
    rules = VidurRules(tables, "pypi", ranges.granularity, costs.layers)
    batches = [Batch.prefill(n, h) for n in (32, 96, 192) for h in (0, 32)]
    batches += [Batch.decode(n, c) for n in (1, 3, 9, 16) for c in (72, 200)]
    errors = [rules.step_ms(batch) * 1e3 / model.step_us(batch) - 1 for batch in batches]
    assert statistics.fmean(map(abs, errors)) < 0.01
    assert max(map(abs, errors)) < 0.03
