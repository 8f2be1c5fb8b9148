"""Measurements that larger points contradict."""

from __future__ import annotations

from types import SimpleNamespace

from sample_records import ATTENTION, LINEAR, SAMPLER, at

from dooly_backend.database.records import Measurement
from dooly_backend.profiling.doubts import doubtful, surprising
from dooly_backend.profiling.evidence import Evidence
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


def surprises(*measurements: Measurement, fresh: tuple[str, ...] = ()) -> list[str]:
    kind = measurements[0].point.kind
    signature = LINEAR if kind == "tokens" else ATTENTION
    points = [WorkloadPoint.parse(key) for key in fresh] or [m.point for m in measurements]
    engine = SimpleNamespace(max_request_len=4096, max_num_tokens=4096, max_num_reqs=64)
    evidence = Evidence(signature, measurements, frozenset(), engine)  # type: ignore[arg-type]
    return [p.key for p in surprising(evidence, points)]


def test_points_that_take_longer_than_their_neighbours_tell() -> None:
    line = [at(f"tokens={n}", 100.0 + n) for n in (1, 64, 512)]
    slow, quick = at("tokens=256", 1.2 * 356.0), at("tokens=128", 0.5 * 228.0)
    assert surprises(*line, slow) == ["tokens=256"]
    assert surprises(*line, slow, fresh=("tokens=64",)) == []
    assert surprises(*line, quick, fresh=("tokens=128",)) == []  # nothing makes a host quicker
    assert surprises(*line, at("tokens=1024", 9999.0)) == []  # no other is as large


def test_scattered_batches_surprise_too() -> None:
    plane = [at(f"batch={n}x1+{c}", 10.0 + n * c / 100) for n in (1, 8) for c in (16, 1024)]
    assert surprises(*plane, at("batch=1x1+512,1x1+100", 90.0)) == ["batch=1x1+512,1x1+100"]
