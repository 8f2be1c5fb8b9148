"""Uneven decodes and mixed batches of a fixed grid."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from dooly_backend.config import Sweep, load_grid
from dooly_backend.spreads import SHAPES, Shape, uneven_decodes
from dooly_backend.sweeps import UnevenGrid
from dooly_backend.workload import Batch


def lengths(batch: Batch) -> list[int]:
    assert len(batch.decodes) == batch.num_reqs
    return [request.context for request in batch.requests]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 3, 8, 13, 64])
def test_the_mean_is_kept_and_the_lengths_differ(shape: Shape, count: int) -> None:
    found = lengths(uneven_decodes(count, 3000, shape))
    assert len(found) == count
    assert statistics.fmean(found) == pytest.approx(3000, abs=1)
    assert max(found) > 1.25 * statistics.fmean(found)
    assert 2 <= len(set(found)) <= 8
    assert len(uneven_decodes(count, 3000, shape).key) < 100
    assert uneven_decodes(count, 3000, shape) == uneven_decodes(count, 3000, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_decode_has_no_shape(shape: Shape) -> None:
    assert uneven_decodes(1, 500, shape) == Batch.decode(1, 500)


def test_the_shapes() -> None:
    assert lengths(uneven_decodes(8, 700, "one_long")) == [2800, *[400] * 7]
    assert lengths(uneven_decodes(4, 800, "ramp")) == [1400, 1000, 600, 200]
    spread = lengths(uneven_decodes(64, 1000, "lognormal"))
    assert statistics.median(spread) < 1000 < spread[0] < 3000
    narrow = lengths(uneven_decodes(64, 1000, "narrow"))
    assert statistics.pstdev(narrow) < 0.6 * statistics.pstdev(spread)
    assert statistics.pstdev(narrow) == pytest.approx(360, abs=40)


def test_a_grid_asks_for_what_it_lists_and_the_model_has_room_for() -> None:
    values = {"name": "x", "tokens": [1], "requests": [1]}
    values |= {"prefill": {"chunk": [16]}, "decode": {"batch": [2], "context": [64]}}
    plain = Sweep.model_validate(values).batch_points(1024)
    assert [point.key for point in plain] == ["batch=1x16+0", "batch=2x1+64"]
    values["uneven"] = {"batch": [2, 4], "context": [400], "shapes": ["one_long"]}
    values["mixed"] = {"chunk": [32], "history": [0, 2000], "batch": [3], "context": [100]}
    keys = [point.key for point in Sweep.model_validate(values).batch_points(1024)]
    assert keys[:2] == [point.key for point in plain]
    # four with one of 1400 tokens are too long, and so is the prefill after 2,000
    assert keys[2:] == ["batch=1x1+700,1x1+100", keys[-1]]
    assert Batch.parse(keys[-1].removeprefix("batch=")).prefills == Batch.prefill(32).requests


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="one_long"):
        UnevenGrid.model_validate({"batch": [2], "context": [9], "shapes": ["square"]})


def test_the_sweep_of_gpus_has_every_kind_of_batch() -> None:
    pytest.importorskip("torch")
    from dooly_backend.profiling.families import shape

    points = load_grid("gpu").batch_points(131072)
    batches = [point.batch for point in points if point.batch is not None]
    found = Counter(map(shape, batches))
    assert found["uneven"] >= 50
    assert found["mixed"] >= 15
    assert found["prefill"] + found["decode"] >= 130
    assert len({point.key for point in points}) == len(points)
