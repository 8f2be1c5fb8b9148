"""What a real profile keeps of its own cost, and what an account makes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from profile_helpers import QUICK, SMOKE, measured, widened

from dooly_backend.database import Database
from dooly_backend.database.check import check_file
from integration.cost.account import account, times_of
from integration.cost.jobs import is_complete

pytest.importorskip("torch")

from conftest import Profiled

from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.profiling.profiler import profile
from dooly_backend.sweeps import load_sweep


def facts_of(database: Database) -> list[dict]:
    return [run.facts for run in database.runs(1, 1)]


def test_a_run_tells_what_it_was_for_and_what_it_took(
    profiled: Profiled, engine: VllmEngine
) -> None:
    with Database.open(profiled.path, read_only=True) as database:
        (facts,) = facts_of(database)
        times = times_of(database, 1)
    assert is_complete(facts, load_sweep("smoke"))
    assert not is_complete(facts, load_sweep("gpu"))
    assert facts["limits"] == {
        "max_num_tokens": engine.max_num_tokens,
        "max_num_reqs": engine.max_num_reqs,
        "max_request_len": engine.max_request_len,
    }
    seconds = facts["spent_s"]
    # This engine was not started by `boot`, which looks at the clock.
    assert set(seconds) == {"trace", "resolve", "setup", "timing", "rest"}
    assert all(took > 0 for took in seconds.values())
    assert sum(seconds.values()) < profiled.result.seconds
    timed = [point.seconds for point in times.values()]
    assert len(timed) == profiled.result.points
    assert all(timed)
    assert sum(timed) == pytest.approx(seconds["timing"], rel=0.02)  # rounded, and doubted points


def test_samples_take_part_of_what_timing_a_point_takes(profiled: Profiled) -> None:
    with Database.open(profiled.path, read_only=True) as database:
        cost = database.timing_us(1)
    found = measured(profiled.path)
    assert cost.keys() == found.keys()
    assert all(cost[key] > sum(found[key].samples_us) for key in found)


def test_the_account_of_a_profile_alone_is_what_it_took(profiled: Profiled) -> None:
    with Database.open(profiled.path, read_only=True) as database:
        found = account(database, 1, "smoke")
        stored = database.info()
    (alone,) = found.profiles
    assert (alone.untimed, alone.id) == (0, 1)
    assert len(alone.workload.items) == len(alone.own) == profiled.result.points
    assert alone.skipped == len(stored.skipped) == 0
    timing = sum(item.seconds for item in alone.own)
    assert timing == pytest.approx(found.seconds["timing"], rel=0.02)
    assert alone.calls == profiled.result.occurrences
    assert not alone.is_of_known_geometry
    assert account_of_nothing(profiled.path) == ()


def account_of_nothing(path: Path) -> tuple:
    with Database.open(path, read_only=True) as database:
        return account(database, 1, "gpu").profiles


def test_a_run_that_finds_all_known_is_recorded_once_for_each_sweep(
    profiled: Profiled, engine: VllmEngine, tmp_path: Path
) -> None:
    path = tmp_path / "copy.db"
    shutil.copy(profiled.path, path)
    narrow = widened(name="narrow", tokens=[1, 16])
    with Database.open(path) as database:
        for sweep in (SMOKE, narrow, narrow):
            assert profile(engine, database, sweep, QUICK).points == 0
        names = [facts["sweep"]["name"] for facts in facts_of(database)]
        found = account(database, 1, "narrow")
    assert names == ["smoke", "narrow"]
    (known,) = found.profiles
    assert known.own  # measured from this configuration, though not by that run
    assert len(known.workload.items) < profiled.result.points
    assert check_file(path).ok


def test_a_profile_that_was_cut_short_goes_on_and_its_cost_adds_up(
    profiled: Profiled, engine: VllmEngine, tmp_path: Path
) -> None:
    class Cut(Exception):
        pass

    class Impatient:
        """Ends the profile after a few points, as a kill would."""

        left = 4

        def phase(self, name: str, total: int | None = None) -> None:
            return None

        def advance(self, points: int = 1) -> None:
            self.left -= points
            if not self.left:
                raise Cut

    path = tmp_path / "cut.db"
    sweep = widened(name="short", tokens=[1, 16], requests=[1],
                    prefill={"chunk": [16]}, decode={"batch": [1], "context": [16]})  # fmt: skip
    with Database.open(path, create=True) as database:
        with pytest.raises(Cut):
            profile(engine, database, sweep, QUICK, progress=Impatient())
        before = times_of(database, 1)
        assert len(before) == 4
        assert account(database, 1, "short").profiles == ()
        result = profile(engine, database, sweep, QUICK)
        after = times_of(database, 1)
        (whole,) = account(database, 1, "short").profiles
    assert {key: after[key] for key in before} == before  # nothing was measured twice
    assert result.points == len(after) - 4
    assert len(whole.own) == len(after)
    assert whole.seconds["timing"] <= sum(point.seconds or 0 for point in after.values()) + 0.01
    assert whole.seconds["trace"] > result.trace.seconds
