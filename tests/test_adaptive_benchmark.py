"""integration/adaptive: held-out places, thinned grids, and judgements without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pandas")

from sample_records import ATTENTION, LINEAR, store

from dooly_backend.config import VidurSweep
from dooly_backend.database import Database
from dooly_backend.database.records import Measurement, RunConditions, Signature
from dooly_backend.profiling.families import shape
from dooly_backend.workload import Batch, WorkloadPoint
from integration.adaptive.held_out import Caps, attention_places, token_places
from integration.adaptive.judging import curves, described, judge, thinned
from integration.adaptive.turns import taking_turns

CAPS = Caps(tokens=512, length=512, batch=16)
GRID = VidurSweep(name="vidur", rule="vidur", tokens=512, length=512, batch=16)


def test_places_lie_within_the_caps_and_are_the_same_every_time() -> None:
    batches = [point.batch for point in attention_places(CAPS, 40) if point.batch]
    assert {shape(batch) for batch in batches} == {"prefill", "decode", "uneven", "mixed"}
    for batch in batches:
        assert batch.num_tokens <= CAPS.tokens
        assert batch.num_reqs <= CAPS.batch
        assert batch.longest <= CAPS.length
    counts = [point.num_tokens or 0 for point in token_places(CAPS, 40)]
    assert all(1 <= count <= CAPS.tokens for count in counts)
    assert token_places(CAPS, 40) == token_places(CAPS, 40)


def test_works_take_turns_at_an_even_pace() -> None:
    order: list[str] = []

    def work(name: str, steps: int) -> Iterator[None]:
        for _ in range(steps):
            order.append(name)
            yield

    taking_turns({work("a", 2): 2, work("b", 8): 8, work("c", 9): 4})
    assert sorted(order) == ["a"] * 2 + ["b"] * 8 + ["c"] * 9
    assert order[:7].count("b") == 4  # with a's first and two of c's
    assert order[-5:] == ["c"] * 5  # which took longer than was thought


def time_us(point: WorkloadPoint) -> float:
    if point.batch is None:
        return 20.0 + 0.5 * (point.num_tokens or 0)
    return 10.0 + 0.01 * sum(r.query * (r.context + r.query / 2) for r in point.batch.requests)


def measured(points: list[WorkloadPoint]) -> list[Measurement]:
    return [Measurement(point, (time_us(point),) * 3) for point in points]


@pytest.mark.parametrize("step", [2, 4, 8, 16])
def test_thinned_grids_keep_their_ends(step: int) -> None:
    curve = measured(GRID.token_points())
    kept = [m.point.num_tokens for m in thinned(curve, step)]
    assert (kept[0], kept[-1]) == (1, 512)
    assert len(curve) / step <= len(kept) <= len(curve) / step + 2
    plane = measured(GRID.batch_points(10**6))
    points = {m.point.batch for m in thinned(plane, step)}
    assert {Batch.decode(1, 32), Batch.decode(16, 480), Batch.prefill(512)} < points
    assert len(points) < 2.5 * len(plane) / step


def test_judged_from_databases(tmp_path: Path) -> None:
    held_out = token_places(CAPS, 12)
    few = [WorkloadPoint("tokens", num_tokens=n) for n in (1, 8, 64, 256, 512)]
    for name, points in (
        ("adaptive", few),
        ("vidur", GRID.token_points()),
        ("held-out", held_out),
    ):
        linear: dict[Signature, list[Measurement]] = {LINEAR: measured(points)}
        with Database.open(tmp_path / f"linear-{name}.db", create=True) as database:
            ids = store(database, linear)
            run = RunConditions("2026-01-01T00:00", "2026-01-01T00:09", {"seconds": 9.0})
            database.record_run(*ids, run)
    table = judge("linear", tmp_path, ["interpolation"])
    curve = curves(table).set_index(["sweep", "part", "shape"])
    assert curve.loc[("adaptive", "all", "tokens"), "points"] == 5
    assert curve.loc[("Vidur's grid", "all", "tokens"), "points"] == len(GRID.token_points())
    assert (curve.loc[[("adaptive", "all", "all")], "mean_error"] < 1e-9).all()
    assert "adaptive 9 s, vidur 9 s" in described("linear", tmp_path)
    assert ATTENTION.hash[:12] not in set(table["signature"])
