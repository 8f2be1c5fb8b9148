"""The profiler: what it measures, what it leaves out, and what is true of the samples."""

from __future__ import annotations

import shutil
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from conftest import Profiled
from engine_helpers import LAYERS, state
from profile_helpers import QUICK, SMOKE, measured, widened

from dooly_backend.database import Database
from dooly_backend.database.records import Signature
from dooly_backend.engine_commands import _lines, _summary
from dooly_backend.engines.base import CapturedCall
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.errors import InputError
from dooly_backend.operations.capture import captured
from dooly_backend.operations.runnable import Entry
from dooly_backend.profiling.measure import Regime, Subject, spread
from dooly_backend.profiling.profiler import profile, subject_of
from dooly_backend.profiling.progress import Silent
from dooly_backend.profiling.steps import operations_us, step_batches
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.regression.step_cost import fit_step_cost
from dooly_backend.workload import Batch, WorkloadPoint
from shims.vidur.costs import StepCosts
from shims.vidur.model import dimensions_of
from shims.vidur.options import VidurOptions
from shims.vidur.ranges import LAYOUTS, Layout, choose_ranges
from shims.vidur.rules import VidurRules
from shims.vidur.tables import build_tables


@pytest.fixture
def path(profiled: Profiled, tmp_path: Path) -> Path:
    """A copy of the profiled database."""
    return Path(shutil.copy(profiled.path, tmp_path / "latency.db"))


@pytest.fixture
def model(profiled: Profiled) -> LatencyModel:
    with Database.open(profiled.path, read_only=True) as database:
        return LatencyModel.load(database)


# -- the first run --------------------------------------------------------------


def test_everything_was_measured(profiled: Profiled, signed: dict[Entry, Signature]) -> None:
    result = profiled.result
    assert (result.signatures_known, result.signatures_new) == (0, 12)
    assert (result.skipped, result.occurrences) == (0, 9 * 30 + 4)
    assert result.operations == len(result.trace.operations)
    found = measured(profiled.path)
    assert result.points == len(found)
    assert result.unstable == sum(m.unstable for m in found.values())
    kinds = {s.hash: s.kind for s in signed.values()}
    expected = {
        "tokens": {p.key for p in SMOKE.token_points()},
        "requests": {p.key for p in SMOKE.request_points()},
        "batch": {p.key for p in SMOKE.batch_points(2047)},
    }
    points: dict[str, set[str]] = {}
    for digest, key in found:
        points.setdefault(digest, set()).add(key)
    assert points == {digest: expected[kind] for digest, kind in kinds.items()}


def test_samples(profiled: Profiled) -> None:
    regime = Regime()
    for (_, key), measurement in measured(profiled.path).items():
        assert len(measurement.samples_us) == regime.repeats, key
        assert min(measurement.samples_us) > 0
        if spread(measurement.samples_us) > regime.spread:
            assert measurement.unstable  # so are calm samples of a host that was busy


def test_more_work_takes_longer(profiled: Profiled, signed: dict[Entry, Signature]) -> None:
    """Sixteen times the tokens through a projection: no noise hides that."""
    found = measured(profiled.path)
    projections = {s.hash for s in signed.values() if "ParallelLinear" in s.name}
    assert len(projections) == 4
    for digest in projections:
        least = {n: min(found[digest, f"tokens={n}"].samples_us) for n in (16, 256)}
        assert least[256] > 2 * least[16]


def test_the_environment_is_this_process(profiled: Profiled, engine: VllmEngine) -> None:
    with Database.open(profiled.path, read_only=True) as database:
        (environment,) = database.environments().values()
        (configuration,) = database.configurations().values()
    assert environment.digest == engine.environment.digest
    assert configuration.digest == engine.configuration.digest
    assert environment.facts["torch"] == torch.__version__


# -- later runs -----------------------------------------------------------------


def test_a_second_run_measures_nothing(engine: VllmEngine, path: Path) -> None:
    before = path.read_bytes()
    found = measured(path)
    with Database.open(path) as database:
        result = profile(engine, database, SMOKE)
    assert (result.signatures_known, result.signatures_new) == (12, 0)
    assert (result.points, result.skipped) == (0, 0)
    assert measured(path) == found
    assert len(path.read_bytes()) == len(before)
    summary = _summary(result, "latency.db")
    assert (summary["points"], summary["signatures_new"]) == (0, 0)
    text = "\n".join(_lines(result, "latency.db"))
    assert "signatures: 12 known, 0 new" in text
    assert "nothing to measure: latency.db knows all of this sweep" in text


def test_a_wider_sweep_measures_only_the_rest(engine: VllmEngine, path: Path) -> None:
    found = measured(path)
    sweep = widened(
        tokens=[16, 64, 65],
        requests=[1, 2, 4],
        decode={"batch": [1, 3], "context": [64, 100]},
    )
    with Database.open(path) as database:
        result = profile(engine, database, sweep, QUICK)
    later = measured(path)
    assert {key: later[key] for key in found} == found  # nothing was measured again
    fresh = Counter(key for _, key in later.keys() - found.keys())
    assert fresh == {
        "tokens=65": 9,
        "requests=2": 2,
        "batch=3x1+64": 1,
        "batch=1x1+100": 1,
        "batch=3x1+100": 1,
    }
    assert (result.points, result.signatures_new, result.signatures_known) == (14, 12, 0)


def test_only_the_signatures_with_new_points_are_new(engine: VllmEngine, path: Path) -> None:
    with Database.open(path) as database:
        result = profile(engine, database, widened(requests=[1, 3]), QUICK)
    assert (result.points, result.signatures_new, result.signatures_known) == (2, 2, 10)


def test_a_wider_sweep_fits_the_step_cost_again(engine: VllmEngine, path: Path) -> None:
    """More points give other sums of the operations; the live steps stay."""
    with Database.open(path) as database:
        before = database.steps(1, 1)
        profile(engine, database, widened(tokens=[1, 4, 32, 128]), QUICK)
        after = database.steps(1, 1)
        model = LatencyModel.load(database)
    assert [step.live_us for step in after] == [step.live_us for step in before]
    assert [s.operations_us for s in after] != [s.operations_us for s in before]
    for step in after:
        operations = operations_us(engine, model, step.batch, step.num_layers)
        assert step.operations_us == pytest.approx(operations)
    assert model.step_cost == fit_step_cost(after)


def test_a_second_model_of_the_same_geometry_measures_nothing(
    engine: VllmEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(engine.configuration, model="someone/else")
    monkeypatch.setattr(engine, "configuration", other)
    with Database.open(path) as database:
        result = profile(engine, database, SMOKE, QUICK)
        assert len(database.configurations()) == 2
    assert (result.points, result.signatures_new) == (0, 0)
    assert {r.models for r in result.reused} == {("HuggingFaceTB/SmolLM-135M",)}
    text = "\n".join(_lines(result, "latency.db"))
    assert "known from HuggingFaceTB/SmolLM-135M: Attention, " in text
    hashes = _summary(result, "latency.db")["reused"]
    assert len(hashes) == 12


class Stopping(Silent):
    """A progress that is interrupted after a number of points."""

    def __init__(self, after: int) -> None:
        self.left = after

    def advance(self, points: int = 1) -> None:
        self.left -= points
        if self.left == 0:
            raise KeyboardInterrupt


def test_an_interrupted_run_is_continued(engine: VllmEngine, tmp_path: Path) -> None:
    path = tmp_path / "latency.db"
    sweep = widened(tokens=[16], requests=[1], decode={"batch": [1], "context": [64]})
    before = state(engine)
    with Database.open(path, create=True) as database, pytest.raises(KeyboardInterrupt):
        profile(engine, database, sweep, QUICK, Stopping(after=5))
    assert state(engine) == before
    found = measured(path)
    assert len(found) == 5
    with Database.open(path) as database:
        result = profile(engine, database, sweep, QUICK)
        assert LatencyModel.load(database).step_cost is not None
    later = measured(path)
    assert result.points == len(later) - 5
    assert {key: later[key] for key in found} == found


def test_a_step_cost_that_is_missing_is_measured(engine: VllmEngine, path: Path) -> None:
    """A run may be killed after its points, ahead of its steps."""
    with Database.open(path) as database:
        database._connection.execute("DELETE FROM step_cost")
        result = profile(engine, database, SMOKE)
        assert result.points == 0
        assert LatencyModel.load(database).step_cost is not None


# -- which call is timed --------------------------------------------------------


def test_subjects_of_a_real_step(engine: VllmEngine, signed: dict[Entry, Signature]) -> None:
    entries = list(signed)
    subjects: dict[str, Subject] = {}
    with captured(engine, Batch.parse("1x16+0,2x1+64"), [e.key for e in entries]) as calls:
        order = [call.path for call in calls]
        for entry, signature in signed.items():
            subjects[entry.path] = subject_of(signature.hash, entries, signed, calls)
    last = f"model.layers.{LAYERS - 1}."
    previous = f"model.layers.{LAYERS - 2}."
    for name in ("self_attn.qkv_proj", "self_attn.attn", "mlp.down_proj", "mlp.act_fn"):
        subject = subjects[last + name]
        assert subject == subjects[f"model.layers.0.{name}"]
        assert subject.call.path == last + name
        assert subject.sibling is not None
        assert subject.sibling.path == previous + name
        assert subject.sibling.target is not subject.call.target  # other weights
        assert subject.predecessor is not None
        assert subject.predecessor.path == order[order.index(last + name) - 1]
    rotary = subjects[last + "self_attn.rotary_emb"]
    assert rotary.sibling is not None
    assert rotary.sibling.path == previous + "self_attn.rotary_emb"
    norm = subjects["model.norm"]  # alike: every norm behind a residual
    assert norm.call.path == "model.norm"
    assert norm.sibling is not None
    assert norm.sibling.path == last + "post_attention_layernorm"
    first = subjects["model.embed_tokens"]
    assert (first.predecessor, first.sibling) == (None, None)
    assert subjects["model.layers.0.input_layernorm"].sibling is None


def call(path: str, target: Any, moment: int = 0) -> CapturedCall:
    return CapturedCall(path, target, (), {}, None, moment)


def test_a_call_that_the_step_does_not_run() -> None:
    entry = Entry("leaf", None, "Leaf", "Leaf", (), False)
    signature = Signature("Leaf", "module", "tokens", "{}")
    with pytest.raises(InputError, match="trace again"):
        subject_of(signature.hash, [entry], {entry: signature}, [call("other", object())])


# -- conservation ---------------------------------------------------------------


def test_a_step_is_the_sum_of_what_was_measured(profiled: Profiled, model: LatencyModel) -> None:
    """At measured points nothing but counts times medians, and the step's own cost."""
    found = measured(profiled.path)
    assert model.step_cost is not None
    for batch in (Batch.prefill(64), Batch.prefill(256), Batch.decode(1, 64), Batch.decode(16, 16)):
        total = 0.0
        for occurrence in model.occurrences:
            point = WorkloadPoint.of(occurrence.signature.kind, batch)
            assert model.occurrence(occurrence, batch).measured
            samples = found[occurrence.signature.hash, point.key].samples_us
            total += occurrence.count * statistics.median(samples)
        assert model.operations_us(batch) == pytest.approx(total)
        own = model.step_cost.time_us(30, batch.num_reqs)
        assert model.step_us(batch) == pytest.approx(total + own)


def test_live_steps_are_kept_beside_their_operations(
    profiled: Profiled, model: LatencyModel, engine: VllmEngine
) -> None:
    with Database.open(profiled.path, read_only=True) as database:
        steps = database.steps(1, 1)
    batches = step_batches(engine)
    assert {(s.batch, s.num_layers) for s in steps} == {(b, n) for b in batches for n in (1, 3)}
    for step in steps:
        assert 3 <= len(step.live_us) <= 9  # disturbed ones are dropped
        assert min(step.live_us) > 0
        operations = operations_us(engine, model, step.batch, step.num_layers)
        assert step.operations_us == pytest.approx(operations)


def test_operations_of_fewer_layers(engine: VllmEngine, model: LatencyModel) -> None:
    batch = Batch.prefill(64)
    one, two, three, whole = (operations_us(engine, model, batch, n) for n in (1, 2, 3, 30))
    assert three - two == pytest.approx(two - one)
    assert whole == pytest.approx(model.operations_us(batch))
    layer = two - one
    assert whole == pytest.approx(one + 29 * layer)


def test_steps_fit_the_engines_limits() -> None:
    small: Any = SimpleNamespace(max_model_len=64, max_num_reqs=4)
    assert [batch.key for batch in step_batches(small)] == ["1x1+32", "4x1+32", "1x32+0"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vidurs_tables_add_up_to_the_step(model: LatencyModel, layout: Layout) -> None:
    """The rules of the simulator on really measured times, which no formula made smooth."""
    costs = StepCosts(model)
    dimensions = dimensions_of(model.configuration, model.occurrences)
    ranges = choose_ranges(costs, VidurOptions(), layout)
    rules = VidurRules(
        build_tables([costs], dimensions, ranges, layout), layout, ranges.granularity, costs.layers
    )
    batches = [Batch.prefill(n, h) for n in (32, 64, 256) for h in (0, 64, 256)]
    batches += [Batch.decode(n, c) for n in (1, 2, 4, 7, 16) for c in (64, 100, 200)]
    errors = [
        rules.step_ms(batch) * 1e3 / model.step_us(batch) - 1
        for batch in batches
        if batch.longest <= ranges.max_length - 2 and batch.num_reqs <= ranges.max_batch
    ]
    assert len(errors) > 15
    assert statistics.fmean(map(abs, errors)) < 0.01
    # Vidur rounds contexts; of sixteen short ones it makes a little more than they are.
    assert max(map(abs, errors)) < 0.02
