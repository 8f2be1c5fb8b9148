"""Measurements that larger points contradict."""

from __future__ import annotations

from sample_records import ATTENTION, LINEAR, SAMPLER, at

from dooly_backend.database.records import Measurement
from dooly_backend.profiling.doubts import doubtful
from dooly_backend.workload import WorkloadPoint


def keys(*measurements: Measurement, fresh: tuple[str, ...] = ()) -> list[str]:
    signature = {"tokens": LINEAR, "requests": SAMPLER, "batch": ATTENTION}[
        measurements[0].point.kind
    ]
    points = [WorkloadPoint.parse(key) for key in fresh] or [m.point for m in measurements]
    return [p.key for p in doubtful(signature, measurements, points, 4096)]


def test_less_work_that_took_longer() -> None:
    slow = at("tokens=1", 400.0, 410.0, 420.0)
    rest = (at("tokens=8", 330.0, 331.0), at("tokens=64", 1200.0))
    assert keys(slow, *rest) == ["tokens=1"]
    assert keys(slow, *rest, fresh=("tokens=8",)) == []  # known before, doubted before


def test_noise_and_tiny_calls_are_not_doubted() -> None:
    assert keys(at("requests=1", 100.0), at("requests=8", 95.0)) == []
    assert keys(at("requests=1", 4.0), at("requests=8", 2.0)) == []
    assert keys(at("tokens=1", 100.0), at("tokens=8", 300.0)) == []


def test_only_equal_depths_compare() -> None:
    assert keys(at("batch=1x1+4000", 90.0), at("batch=8x1+16", 30.0)) == []
    assert keys(at("batch=1x1+64", 90.0), at("batch=8x1+64", 30.0)) == ["batch=1x1+64"]
    assert keys(at("batch=1x64+0", 90.0), at("batch=1x512+0", 30.0)) == ["batch=1x64+0"]
    # A prefill and a decode, or scattered batches, are no two sizes of one thing.
    assert keys(at("batch=1x64+0", 90.0), at("batch=8x1+64", 30.0)) == []
    assert keys(at("batch=1x64+0,1x1+9", 90.0), at("batch=1x128+0,1x1+9", 30.0)) == []
