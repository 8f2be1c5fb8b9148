"""`dooly db diff`: what moved between two environments, and what did not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Dooly
from sample_records import ATTENTION, CPU, H200, LINEAR, OCCURRENCES, SAMPLER, signature, store

from dooly_backend.database import Database
from dooly_backend.database.diff import DiffResult, Place, choose, choose_two, diff
from dooly_backend.database.records import Environment, Measurement, Signature
from dooly_backend.errors import InputError
from dooly_backend.workload import WorkloadPoint

NEWER = replace(H200, engine_version="0.32.0")
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512)


def noisy(seed: int, scale: float = 1.0, samples: int = 7, spread: float = 0.02) -> list:
    """Times of a linear layer over TOKENS, each sample a little off."""
    random = np.random.default_rng(seed)
    return [
        Measurement(
            WorkloadPoint("tokens", num_tokens=n),
            tuple(scale * (20 + n / 4) * random.normal(1, spread, samples)),
        )
        for n in TOKENS
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "latency.db"


def compared(
    path: Path,
    old: dict[Signature, Sequence[Measurement]],
    new: dict[Signature, Sequence[Measurement]],
    *,
    newer: Environment = NEWER,
    **options: float,
) -> DiffResult:
    with Database.open(path, create=True) as database:
        _, before = store(database, old)
        _, after = store(database, new, environment=newer)
        return diff(Place(database, before), Place(database, after), **options)


def test_what_got_slower_is_found_and_the_rest_is_not(path: Path) -> None:
    other = signature("Other")
    result = compared(
        path,
        {LINEAR: noisy(1), other: noisy(2)},
        {LINEAR: noisy(3), other: noisy(4, scale=1.12)},
    )
    assert [(c.name, c.verdict) for c in result.changes] == [
        ("Other", "slower"),
        ("QKVParallelLinear", "unchanged"),
    ]
    (moved,) = result.moved
    assert moved.ratio == pytest.approx(1.12, abs=0.02)
    assert moved.p < 0.05
    assert all(point.moved for point in moved.points)


def test_noise_alone_is_rarely_significant(path: Path) -> None:
    """Forty signatures of equal times: the correction keeps false findings out."""
    equal = [signature(f"S{n}") for n in range(40)]
    result = compared(
        path,
        {s: noisy(n, spread=0.08) for n, s in enumerate(equal)},
        {s: noisy(100 + n, spread=0.08) for n, s in enumerate(equal)},
    )
    assert len(result.changes) == 40
    assert len(result.moved) <= 2
    assert any(change.verdict == "undecided" for change in result.changes)


def test_a_significant_change_below_the_threshold_does_not_matter(path: Path) -> None:
    old, new = {LINEAR: noisy(1, spread=0.001)}, {LINEAR: noisy(2, scale=1.03, spread=0.001)}
    result = compared(path, old, new)
    assert [c.verdict for c in result.changes] == ["unchanged"]
    assert max(point.p for point in result.changes[0].points) < 0.05
    with Database.open(path) as database:
        result = diff(Place(database, 1), Place(database, 2), threshold=0.02)
    assert [c.verdict for c in result.changes] == ["slower"]


def test_a_part_of_the_range_that_moved(path: Path) -> None:
    """A kernel-choice boundary that an upgrade shifted: one point of eight."""
    moved = noisy(2)
    moved[5] = replace(moved[5], samples_us=tuple(2 * s for s in moved[5].samples_us))
    result = compared(path, {LINEAR: noisy(1)}, {LINEAR: moved})
    (change,) = result.moved
    assert [point.point for point in change.points if point.moved] == ["tokens=128"]
    assert change.verdict == "slower"


def test_faster_here_and_slower_there_is_mixed(path: Path) -> None:
    new = noisy(2)
    for index, factor in ((0, 0.5), (7, 2.0)):
        samples = tuple(factor * s for s in new[index].samples_us)
        new[index] = replace(new[index], samples_us=samples)
    result = compared(path, {LINEAR: noisy(1)}, {LINEAR: new})
    assert [c.verdict for c in result.moved] == ["mixed"]


def test_few_samples_of_many_points_tell_together(path: Path) -> None:
    """Three against three are never significant on their own."""
    old, new = noisy(1, samples=3), noisy(2, scale=1.2, samples=3)
    (change,) = compared(path, {LINEAR: old}, {LINEAR: new}).changes
    assert not any(point.moved for point in change.points)
    assert change.verdict == "slower"


def test_single_samples_of_few_points_are_undecided(path: Path) -> None:
    old, new = noisy(1, samples=1)[:3], noisy(2, scale=2, samples=1)[:3]
    (change,) = compared(path, {LINEAR: old}, {LINEAR: new}).changes
    assert (change.verdict, change.moved) == ("undecided", False)


def test_signatures_whose_kernels_changed_are_paired_by_place(path: Path) -> None:
    replaced = signature("QKVParallelLinear_new_kernel")
    graph = [replace(o, signature=replaced) if o.signature == LINEAR else o for o in OCCURRENCES]
    with Database.open(path, create=True) as database:
        _, before = store(database, {LINEAR: noisy(1), SAMPLER: []})
        _, after = store(
            database, {replaced: noisy(2, scale=0.5)}, environment=NEWER, occurrences=graph
        )
        result = diff(Place(database, before), Place(database, after))
    (change,) = result.moved
    assert (change.old, change.new) == (LINEAR.hash, replaced.hash)
    assert change.paths == ("model.layers.*.qkv_proj",)
    assert change.verdict == "faster"
    assert (result.only_old, result.only_new) == ((), ())


def test_what_only_one_side_has_is_told(path: Path) -> None:
    with Database.open(path, create=True) as database:
        _, before = store(database, {LINEAR: noisy(1), SAMPLER: [at_requests()]}, occurrences=[])
        _, after = store(
            database, {LINEAR: noisy(2), ATTENTION: []}, environment=NEWER, occurrences=[]
        )
        point = WorkloadPoint("tokens", num_tokens=8)
        database._connection.execute(
            "DELETE FROM measurement WHERE environment_id = ? AND point_id ="
            " (SELECT id FROM workload_point WHERE key = ?)", (after, point.key)
        )  # fmt: skip
        database.skip(LINEAR, after, point, "out of memory")
        result = diff(Place(database, before), Place(database, after))
    assert [s.name for s in result.only_old] == ["Sampler"]
    assert result.only_new == ()
    assert result.lost_points == {LINEAR.hash: ("tokens=8",)}
    assert len(result.changes[0].points) == len(TOKENS) - 1


def at_requests() -> Measurement:
    return Measurement(WorkloadPoint("requests", num_reqs=1), (3.0,))


# -- which environments ----------------------------------------------------------


def test_environments_are_chosen_by_what_tells_them_apart(path: Path) -> None:
    with Database.open(path, create=True) as database:
        old = database.add_environment(H200)
        new = database.add_environment(NEWER)
        assert choose_two(database, None, None) == (old, new)
        assert choose_two(database, "0.32", None) == (new, old)
        cpu = database.add_environment(CPU)
        assert choose(database, CPU.digest[:8]) == cpu
        assert choose(database, "epyc") == cpu
        assert choose_two(database, "vllm 0.32", "amd") == (new, cpu)
        for text in ("H200", "nothing"):
            with pytest.raises(InputError, match=r"NVIDIA H200, vllm 0\.25\.1 .*: choose one with"):
                choose(database, text)
        with pytest.raises(InputError, match="has 3 environments"):
            choose_two(database, None, None)
        with pytest.raises(InputError, match="the same environment"):
            choose_two(database, "0.32", "0.32")


# -- the command -----------------------------------------------------------------


def test_the_command(path: Path, dooly: Dooly) -> None:
    compared(path, {LINEAR: noisy(1)}, {LINEAR: noisy(2, scale=1.5)})
    result = dooly("db", "diff", "latency.db", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 1, result.stderr
    assert (report["ok"], report["moved"], report["compared"]) == (False, 1, 1)
    assert report["signatures"][0]["verdict"] == "slower"
    told = dooly("db", "diff", "latency.db", "--from", "0.32", "--to", "0.25")
    assert told.returncode == 1
    assert told.stderr == "error: 1 signatures moved by more than 5%\n"
    assert "faster: QKVParallelLinear" in told.stdout
    calm = dooly("db", "diff", "latency.db", "--threshold", "80")
    assert (calm.returncode, calm.stderr) == (0, "")


def test_the_command_on_two_files(tmp_path: Path, dooly: Dooly) -> None:
    for name, scale in (("a.db", 1.0), ("b.db", 1.0), ("c.db", 1.5)):
        with Database.open(tmp_path / name, create=True) as database:
            store(database, {LINEAR: noisy(ord(name[0]), scale)})
    assert dooly("db", "diff", "a.db", "b.db").returncode == 0
    assert dooly("db", "diff", "a.db", "c.db").returncode == 1
    assert dooly("db", "diff", "a.db", "none.db").returncode == 2
    alone = dooly("db", "diff", "a.db")
    assert alone.returncode == 2
    assert "the same environment" in alone.stderr
