"""`dooly db merge`: the union of databases, whatever the order."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Dooly
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import (
    ATTENTION,
    CPU,
    H200,
    LINEAR,
    OCCURRENCES,
    QWEN,
    ROPE,
    SAMPLER,
    at,
    signature,
    store,
)

from dooly_backend.database import Database
from dooly_backend.database.check import check_file
from dooly_backend.database.content import content_digest, contents
from dooly_backend.database.merge import Body, merge, united
from dooly_backend.database.records import (
    KvCapacity,
    RunConditions,
    StepCost,
    StepMeasurement,
)
from dooly_backend.errors import InputError
from dooly_backend.workload import Batch, WorkloadPoint

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write a database of that name through a function that fills it."""

    def build(name: str, fill: Callable[[Database], object]) -> Path:
        path = tmp_path / name
        with Database.open(path, create=True) as database:
            fill(database)
        return path

    return build


def fill_first(database: Database) -> None:
    ids = store(
        database,
        {
            ROPE: [at("constant", 1.0)],
            LINEAR: [at("tokens=8", 1.0, 2.0), at("tokens=16", 4.0, unstable=True)],
        },
    )
    database.skip(LINEAR, ids[1], WorkloadPoint.parse("tokens=99"), "out of memory")
    database.record_step(*ids, StepMeasurement(Batch.prefill(32), 2, (90.0, 91.0), 70.0))
    database.set_step_cost(*ids, StepCost(1.0, 2.0, 3.0))
    database.record_run(*ids, RunConditions("2026-01-01T00:00", "2026-01-01T00:09", {"load": 1}))
    database.set_kv_capacity(*ids, KvCapacity(1, (), 2, 3, 4))


def fill_second(database: Database) -> None:
    store(database, {SAMPLER: [at("requests=1", 3.0)]}, environment=CPU, model="other/model")
    ids = store(
        database,
        {
            LINEAR: [at("tokens=16", 5.0), at("tokens=8", 1.5), at("tokens=99", 9.0)],
            ATTENTION: [at("batch=1x16+0", 5.0)],
        },
        facts={"head_dim": 64},
    )
    for tokens in (32, 64):
        step = StepMeasurement(Batch.prefill(tokens), 2, (80.0,), 70.0)
        database.record_step(*ids, step)
    database.set_step_cost(*ids, StepCost(4.0, 5.0, 6.0))
    database.record_run(*ids, RunConditions("2026-01-01T00:00", "2026-01-01T00:12", {"load": 2}))
    database.set_kv_capacity(*ids, KvCapacity(5, (), 6, 7, 8))


def digest(path: Path) -> str:
    with Database.open(path, read_only=True) as database, database.reading() as connection:
        return content_digest(contents(connection))


def test_either_order_gives_equal_contents(make: Make, tmp_path: Path) -> None:
    a, b = make("a.db", fill_first), make("b.db", fill_second)
    sources = {path: path.read_bytes() for path in (a, b)}
    one = merge(tmp_path / "ab.db", [a, b])
    other = merge(tmp_path / "ba.db", [b, a])
    assert one.content_digest == other.content_digest == digest(tmp_path / "ab.db")
    assert {path: path.read_bytes() for path in (a, b)} == sources
    assert merge(a, [b]).content_digest == one.content_digest
    assert merge(b, [tmp_path / "ab.db"]).content_digest == one.content_digest
    assert digest(a) == digest(b) == digest(tmp_path / "ba.db") == one.content_digest
    for path in (a, b, tmp_path / "ab.db"):
        assert check_file(path).ok


def test_merging_again_changes_nothing(make: Make, tmp_path: Path) -> None:
    a, b = make("a.db", fill_first), make("b.db", fill_second)
    first = merge(a, [b])
    assert sum(first.added.values()) > 5
    again = merge(a, [b, a])
    assert again.content_digest == first.content_digest
    assert not any((*again.added.values(), *again.replaced.values()))


def test_nothing_is_lost_and_samples_stay_raw(make: Make) -> None:
    a, b = make("a.db", fill_first), make("b.db", fill_second)
    merge(a, [b])
    with Database.open(a, read_only=True) as database:
        environments = {e.device: i for i, e in database.environments().items()}
        here = environments[H200.device]
        # Stable before unstable, then more samples, measured before skipped.
        assert database.measurements(LINEAR.hash, here) == [
            at("tokens=8", 1.0, 2.0),
            at("tokens=16", 5.0),
            at("tokens=99", 9.0),
        ]
        assert database.skipped(LINEAR.hash, here) == []
        assert database.measurements(ROPE.hash, here) == [at("constant", 1.0)]
        assert database.measurements(SAMPLER.hash, environments[CPU.device]) == [
            at("requests=1", 3.0)
        ]
        assert database.measurements(SAMPLER.hash, here) == []  # environments do not mix
        qwen = next(i for i, c in database.configurations().items() if c.model == QWEN.model)
        # The cost goes with the steps that it was fitted to.
        assert database.step_cost(qwen, here) == StepCost(4.0, 5.0, 6.0)
        assert [step.live_us for step in database.steps(qwen, here)] == [(80.0,), (80.0,)]
        # Of two states of one run, the later.
        assert [run.facts for run in database.runs(qwen, here)] == [{"load": 2}]


def test_what_a_measurement_cost_goes_where_it_goes(make: Make, tmp_path: Path) -> None:
    """The stable measurement stays with its cost; of equal ones, the one whose cost is known."""

    def costing(us: float | None, unstable: bool = False) -> Callable[[Database], object]:
        points = [replace(at("tokens=8", 4.0, unstable=unstable), timing_us=us)]
        return lambda database: store(database, {LINEAR: points})

    stable, worse = make("a.db", costing(100.0)), make("b.db", costing(900.0, unstable=True))
    unknown = make("c.db", costing(None))
    for name, sources in enumerate(itertools.permutations([stable, worse, unknown])):
        merge(tmp_path / f"{name}.db", sources)
        with Database.open(tmp_path / f"{name}.db", read_only=True) as database:
            assert database.timing_us(1) == {(LINEAR.hash, "tokens=8"): 100.0}
        assert check_file(tmp_path / f"{name}.db").ok


def test_graphs_of_two_environments_are_kept_apart(make: Make) -> None:
    other = [replace(OCCURRENCES[1], position=0, signature=signature("OtherKernels"))]
    a = make("a.db", lambda db: store(db, {}))
    b = make("b.db", lambda db: store(db, {}, environment=CPU, occurrences=other))
    merge(a, [b])
    with Database.open(a, read_only=True) as database:
        environments = {e.device: i for i, e in database.environments().items()}
        assert database.occurrences(1, environments[H200.device]) == list(OCCURRENCES)
        assert database.occurrences(1, environments[CPU.device]) == other


def test_one_environment_with_other_facts_is_another(make: Make) -> None:
    changed = replace(H200, facts={**H200.facts, "driver": "580"})
    a = make("a.db", lambda db: store(db, {LINEAR: [at("tokens=8", 1.0)]}))
    b = make("b.db", lambda db: store(db, {LINEAR: [at("tokens=8", 2.0)]}, environment=changed))
    merge(a, [b])
    with Database.open(a, read_only=True) as database:
        found = {
            e.facts["driver"]: database.measurements(LINEAR.hash, i)
            for i, e in database.environments().items()
        }
    assert found == {"570.1": [at("tokens=8", 1.0)], "580": [at("tokens=8", 2.0)]}


def test_an_unsound_file_is_refused_and_nothing_changes(make: Make, tmp_path: Path) -> None:
    a, b = make("a.db", fill_first), make("b.db", fill_second)
    connection = sqlite3.connect(b, isolation_level=None)
    connection.execute("UPDATE environment SET facts = '{}'")
    connection.close()
    before = digest(a)
    with pytest.raises(InputError, match=r"b\.db is not sound: .*nothing was merged"):
        merge(a, [b])
    with pytest.raises(InputError, match=r"b\.db is not sound"):
        merge(b, [a])
    assert digest(a) == before
    with pytest.raises(InputError, match="is not sound"):
        merge(tmp_path / "new.db", [b])
    assert not (tmp_path / "new.db").exists()


def test_a_signature_with_two_meanings_is_refused(make: Make) -> None:
    otherwise = replace(LINEAR, kind="requests")
    a = make("a.db", fill_first)

    def fill(database: Database) -> None:
        here = database.add_environment(H200)
        database.record(otherwise, here, at("requests=8", 1.0))

    b = make("b.db", fill)
    before = digest(a)
    with pytest.raises(InputError, match=r"QKVParallelLinear \(module, requests\) in one file"):
        merge(a, [b])
    assert digest(a) == before


# -- the order of contents, over generated files ---------------------------------

KEYS = ("tokens=1", "tokens=2", "tokens=3")
row = st.fixed_dictionaries(
    {
        "signature": st.just("s"),
        "environment_id": st.sampled_from(["e", "f"]),
        "point_id": st.sampled_from(KEYS),
        "samples_us": st.sampled_from(["[1.0]", "[2.0]"]),
        "n": st.integers(1, 2),
        "unstable": st.integers(0, 1),
        "measured_at": st.sampled_from(["2026-01-01", "2026-01-02"]),
    }
)


def units(rows: list[dict]) -> dict:
    return {
        ("point", (r["signature"], r["environment_id"], r["point_id"])): Body({"measurement": [r]})
        for r in rows
    }


def texts(union: dict) -> dict[tuple, str]:
    return {key: body.text for key, body in union.items()}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(row, max_size=5).map(units), min_size=2, max_size=3))
def test_the_union_is_order_free_idempotent_and_associative(files: list[dict]) -> None:
    union = united(files)
    for order in itertools.permutations(files):
        assert texts(united(order)) == texts(union)
    assert texts(united([union, *files])) == texts(union)
    assert texts(united([files[0], united(files[1:])])) == texts(union)


# -- the command -----------------------------------------------------------------


def test_the_command(make: Make, dooly: Dooly) -> None:
    make("a.db", fill_first), make("b.db", fill_second)
    result = dooly("db", "merge", "all.db", "a.db", "b.db", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["added"]["point"] == 8 - 2
    assert report["kept"]["point"] == 3  # two that the other has better, one skipped
    again = dooly("db", "merge", "all.db", "b.db")
    assert "nothing new" in again.stdout
    missing = dooly("db", "merge", "all.db", "none.db")
    assert missing.returncode == 2
    assert "none.db does not exist" in missing.stderr
