"""An upgrade of the engine: few points confirm, the rest is taken over or measured anew."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from conftest import Profiled
from sample_records import CPU, H200, LINEAR, SAMPLER, at, store

from dooly_backend.config import load_sweep
from dooly_backend.database import Database
from dooly_backend.database.check import check_file
from dooly_backend.database.inherit import inherit, inherited
from dooly_backend.database.merge import merge
from dooly_backend.database.records import Measurement
from dooly_backend.engine_commands import _lines, _summary
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.errors import InputError
from dooly_backend.profiling.confirm import confirm, few, scatter, source_of
from dooly_backend.profiling.measure import Regime
from dooly_backend.profiling.profiler import profile
from dooly_backend.profiling.rounds import Work
from dooly_backend.workload import WorkloadPoint

OLDER = replace(H200, engine_version="0.25.0")
SIZES = (1, 8, 64, 512)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "latency.db"


def times(scale: float = 1.0) -> list[Measurement]:
    """Seven samples a size, a percent apart."""
    return [
        Measurement(
            WorkloadPoint("tokens", num_tokens=n),
            tuple(scale * (10 + n) * (1 + i / 500) for i in range(7)),
        )
        for n in SIZES
    ]


def engine(**limits: int) -> Any:
    values = {"max_num_tokens": 2048, "max_num_reqs": 64, "max_request_len": 2047} | limits
    return SimpleNamespace(environment=H200, **values)


class Measures:
    """Settles work with times that are `scale` times the older ones; remembers what it did."""

    def __init__(self, database: Database, environment_id: int, scale: float) -> None:
        self.database, self.environment_id = database, environment_id
        self.times = {m.point: m for m in times(scale)}
        self.points: list[str] = []

    def __call__(self, work: Work) -> None:
        for keys in work.by_batch.values():
            for _, point in keys:
                self.points.append(point.key)
                self.database.record(LINEAR, self.environment_id, self.times[point])


@pytest.mark.parametrize(("scale", "taken"), [(1.0, 1), (1.02, 1), (1.2, 0), (0.8, 0)])
def test_what_has_not_moved_is_taken_over(path: Path, scale: float, taken: int) -> None:
    with Database.open(path, create=True) as database:
        _, old = store(database, {LINEAR: times()}, environment=OLDER)
        _, new = store(database, {})
        measures = Measures(database, new, scale)
        result = confirm(engine(), database, old, new, [LINEAR, SAMPLER], measures)
        assert measures.points == ["tokens=1", "tokens=64", "tokens=512"]
        assert (len(result.confirmed), len(result.changed)) == (taken, 1 - taken)
        assert result.points == taken
        stored = database.measurements(LINEAR.hash, new)
        assert len(stored) == 3 + taken
        if taken:
            assert stored[1] == times()[1]  # raw samples of the older environment
            assert inherited(database, new) == {(LINEAR.hash, "tokens=8"): old}
        again = confirm(engine(), database, old, new, [LINEAR], measures)
        assert (again.points, len(measures.points)) == (0, 3)
    assert check_file(path).ok


@pytest.mark.parametrize(("shift", "taken"), [(0.0, 1), (0.06, 1), (0.3, 0)])
def test_what_sessions_scatter_by_is_no_change(path: Path, shift: float, taken: int) -> None:
    """Points a tenth up and down, about a mean that is where it was or further up."""
    with Database.open(path, create=True) as database:
        _, old = store(database, {LINEAR: times()}, environment=OLDER)
        _, new = store(database, {})
        measures = Measures(database, new, 1.0)
        for scale, n in zip((0.9, 1.0, 1.1), (1, 64, 512), strict=True):
            (point,) = (p for p in measures.times if p.num_tokens == n)
            scaled = {m.point: m for m in times(scale + shift)}
            measures.times[point] = scaled[point]
        result = confirm(engine(), database, old, new, [LINEAR], measures)
    assert (len(result.confirmed), len(result.changed)) == (taken, 1 - taken)
    assert 0.05 < result.scatter < 0.2


def test_scatter_is_that_about_each_signatures_mean() -> None:
    source = random.Random(0)
    groups = [[mean + source.gauss(0, 0.05) for _ in range(3)] for mean in (0.0, 0.5) * 100]
    assert scatter(groups) == pytest.approx(0.05, rel=0.1)
    assert scatter([[0.3], [-0.2]]) == 0.0
    shifted = [[*group[:2], group[2] + 1.0] for group in groups[:20]] + groups[20:]
    assert scatter(shifted) < 0.07  # a tenth of the signatures changed at one size


def test_points_beyond_the_engines_limits_are_left_out(path: Path) -> None:
    with Database.open(path, create=True) as database:
        _, old = store(database, {LINEAR: times()}, environment=OLDER)
        _, new = store(database, {})
        measures = Measures(database, new, 1.0)
        confirm(engine(max_num_tokens=64), database, old, new, [LINEAR], measures)
        keys = {m.point.key for m in database.measurements(LINEAR.hash, new)}
    assert keys == {"tokens=1", "tokens=8", "tokens=64"}


def test_few_points_span_the_times_of_both_phases() -> None:
    decodes = [at(f"batch={n}x1+64", float(n)) for n in (1, 2, 4, 8, 16)]
    prefills = [at(f"batch=1x{n}+0", 10.0 * n) for n in (16, 64)]
    keys = [m.point.key for m in few([*decodes, *prefills])]
    assert keys == [
        "batch=1x1+64",
        "batch=4x1+64",
        "batch=16x1+64",
        "batch=1x16+0",
        "batch=1x64+0",
    ]


def test_a_source_must_be_an_older_one_of_this_device(path: Path) -> None:
    with Database.open(path, create=True) as database:
        old, cpu = database.add_environment(OLDER), database.add_environment(CPU)
        database.add_environment(H200)
        assert source_of(engine(), database, "0.25.0") == old
        with pytest.raises(InputError, match="is another device than NVIDIA H200"):
            source_of(engine(), database, "epyc")
        with pytest.raises(InputError, match="is this environment"):
            source_of(engine(), database, H200.digest[:12])
        assert cpu


def test_what_was_taken_over_twice_keeps_its_first_source(path: Path) -> None:
    with Database.open(path, create=True) as database:
        _, first = store(database, {LINEAR: times()}, environment=OLDER)
        second, third = database.add_environment(H200), database.add_environment(CPU)
        keys = ["tokens=8", "tokens=64"]
        assert inherit(database, LINEAR, first, second, keys) == 2
        assert inherit(database, LINEAR, first, second, keys) == 0
        assert inherit(database, LINEAR, second, third, keys) == 2
        assert set(inherited(database, third).values()) == {first}
        database.record(LINEAR, third, at("tokens=8", 1.0), replace=True)
        assert list(inherited(database, third)) == [(LINEAR.hash, "tokens=64")]


def test_a_measured_point_is_merged_before_one_taken_over(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with Database.open(path, create=True) as database:
        _, old = store(database, {LINEAR: times()}, environment=OLDER)
        _, new = store(database, {})
        inherit(database, LINEAR, old, new, ["tokens=8", "tokens=64"])
    with Database.open(other, create=True) as database:
        store(database, {LINEAR: [at("tokens=8", 3.0, unstable=True)]})
    merge(path, [other])
    with Database.open(path, read_only=True) as database:
        assert database.measurements(LINEAR.hash, new)[0] == at("tokens=8", 3.0, unstable=True)
        assert inherited(database, new) == {(LINEAR.hash, "tokens=64"): old}
    assert check_file(path).ok


def test_a_real_upgrade(profiled: Profiled, engine: VllmEngine, tmp_path: Path) -> None:
    """The profile as if of an older engine, in which one signature was ten times as slow."""
    path = Path(shutil.copy(profiled.path, tmp_path / "latency.db"))
    older = replace(engine.environment, engine_version="0.31.0")
    regime = Regime(repeats=5, warmups=1, rounds=1)
    with Database.open(path) as database:
        old = database.add_environment(older)
        slow = next(h for h, s in database.signatures().items() if s.name == "LlamaMLP"
                    or "MergedColumn" in s.name)  # fmt: skip
        for hash_, signature in database.signatures().items():
            for m in database.measurements(hash_, 1):
                factor = 10 if hash_ == slow else 1
                scaled = tuple(factor * us for us in m.samples_us)
                database.record(signature, old, replace(m, samples_us=scaled))
        with database.writing() as connection:
            for table in ("measurement", "step_cost", "step_measurement"):
                connection.execute(f"DELETE FROM {table} WHERE environment_id = 1")
        source = source_of(engine, database, "vllm 0.31")
        result = profile(
            engine, database, load_sweep("smoke"), regime, confirm_from=source, tolerance=2.0
        )
    found = result.confirmation
    assert found is not None
    assert [s.hash for s in found.changed] == [slow]
    assert len(found.confirmed) == 11
    assert found.points + result.points == profiled.result.points
    assert found.points >= 11
    assert _summary(result, "latency.db")["inherited"] == found.points
    text = "\n".join(_lines(result, "latency.db"))
    assert "confirmed from" in text
    assert "changed since, measured in full: 1" in text
    assert check_file(path).ok
