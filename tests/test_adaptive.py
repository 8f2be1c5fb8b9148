"""The adaptive sweep: where it measures, when it stops, and what it knows afterwards."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dooly_backend.config import AdaptiveSweep, Sweep, load_grid, load_sweep
from dooly_backend.database.records import Measurement, Signature
from dooly_backend.errors import InputError
from dooly_backend.profiling.adaptive import (
    held_out_errors,
    most_points,
    needs,
)
from dooly_backend.profiling.evidence import Evidence
from dooly_backend.profiling.families import Plane, families, shape
from dooly_backend.profiling.ranges import Range
from dooly_backend.profiling.sweep import batch_of, fits
from dooly_backend.regression.baseline import RoutingLatency, signature_latency
from dooly_backend.workload import Batch, PointKind, WorkloadPoint

SWEEP = AdaptiveSweep(name="test", target=0.03, tokens=4096, requests=64, context=4000)
ENGINE: Any = SimpleNamespace(max_num_tokens=8192, max_num_reqs=256, max_request_len=8191)
MOE = '{"routing": {"experts": 16, "top_k": 2}}'

Device = Callable[[WorkloadPoint], float]


def signature(kind: PointKind) -> Signature:
    return Signature("x", "module", kind, MOE)


def sweeping(
    kind: PointKind,
    device: Device,
    sweep: AdaptiveSweep = SWEEP,
    engine: Any = ENGINE,
    begun: tuple[Measurement, ...] = (),
    rounds: int = 200,
) -> Evidence:
    """What is known when `device` (microseconds of a point) has answered every round."""
    known = Evidence(signature(kind), begun, frozenset(m.point.key for m in begun), engine)
    for _ in range(rounds):
        wanted: list[WorkloadPoint] = []
        for need in needs(known, sweep):
            starting = need.candidates if need.urgent else need.candidates[:1]
            wanted += itertools.chain.from_iterable(c.points for c in starting)
        if not wanted:
            return known
        measured = [Measurement(p, (device(p),) * 3) for p in dict.fromkeys(wanted)]
        known = extended(known, measured)
    return known


def extended(known: Evidence, measured: list[Measurement]) -> Evidence:
    everything = (*known.measurements, *measured)
    settled = known.settled | {m.point.key for m in measured}
    return Evidence(known.signature, everything, settled, known.engine)


def error_at(known: Evidence, device: Device, points: list[WorkloadPoint]) -> float:
    """Mean relative error at points that were not measured."""
    latency = signature_latency(known.signature, known.measurements)
    errors = []
    for point in points:
        if isinstance(latency, RoutingLatency):
            estimate, _ = latency.at_routing(point.num_tokens or 0, point.num_experts or 0)
        else:
            estimate, _ = latency.at(batch_of(point, ENGINE))
        errors.append(abs(estimate.statistics.median_us / device(point) - 1))
    return statistics.fmean(errors)


# -- curves ---------------------------------------------------------------------


def tokens(count: int) -> WorkloadPoint:
    return WorkloadPoint("tokens", num_tokens=count)


def smooth(point: WorkloadPoint) -> float:
    count = point.num_tokens or 0
    return 20.0 + 0.4 * count + 1e-4 * count**2


def test_a_smooth_curve_takes_few_points() -> None:
    known = sweeping("tokens", smooth)
    assert len(known.measurements) <= 14
    assert needs(known, SWEEP) == []
    everywhere = [tokens(n) for n in range(1, 4097, 13)]
    assert error_at(known, smooth, everywhere) < SWEEP.target


def test_a_straight_line_takes_its_ends_and_the_checks() -> None:
    known = sweeping("tokens", lambda point: 10.0 + (point.num_tokens or 0))
    starting = Range(1, 4096).rungs()
    counts = [m.point.num_tokens for m in known.measurements]
    assert counts[: len(starting)] == starting
    assert len(counts) == len(starting) + SWEEP.held_out


@pytest.mark.parametrize("edge", [48, 300, 1024, 3000])
def test_a_jump_is_closed_in(edge: int) -> None:
    """Twice the time beyond some number of tokens: a tile more, another kernel."""

    def device(point: WorkloadPoint) -> float:
        return 200.0 if (point.num_tokens or 0) <= edge else 400.0

    known = sweeping("tokens", device)
    counts = sorted(m.point.num_tokens or 0 for m in known.measurements)
    below = max(n for n in counts if n <= edge)
    above = min(n for n in counts if n > edge)
    assert above - below <= max(8, 0.1 * edge)
    assert len(counts) < 30
    everywhere = [tokens(n) for n in range(1, 4097, 13)]
    assert error_at(known, device, everywhere) < SWEEP.target


def test_tiles_do_not_hide_what_lies_between_them() -> None:
    """A kernel that takes a fifth less at multiples of 8: most steps are no such multiple."""

    def device(point: WorkloadPoint) -> float:
        count = point.num_tokens or 0
        return (0.8 if count % 8 == 0 else 1.0) * (100.0 + 2 * count)

    known = sweeping("tokens", device)
    random = [tokens(n) for n in range(17, 4097, 37)]
    assert error_at(known, device, random) < 0.06


def test_what_cannot_be_predicted_ends_at_the_cap() -> None:
    def device(point: WorkloadPoint) -> float:
        return 100.0 * (1 + (point.num_tokens or 0) * 2654435761 % 97) ** 2

    known = sweeping("tokens", device)
    assert len(known.measurements) == SWEEP.points
    assert needs(known, SWEEP) == []
    (family,) = families(known.signature, SWEEP, ENGINE)
    assert (
        statistics.fmean(e.error for e in held_out_errors(known, family)[: SWEEP.held_out])
        > SWEEP.target
    )


@pytest.mark.parametrize(("samples", "goes_on"), [(5, False), (500, True)])
def test_noise_counts_as_far_as_samples_leave_it(samples: int, goes_on: bool) -> None:
    """Bends of 10 % beside samples that scatter by 20 %: few samples cannot tell, many can."""
    spread = [0.9 + 0.2 * i / (samples - 1) for i in range(samples)]

    def measured(point: WorkloadPoint) -> Measurement:
        true = 100.0 * (1 + 0.1 * ((point.num_tokens or 0) % 4 > 1))
        return Measurement(point, tuple(true * share for share in spread))

    known = Evidence(signature("tokens"), (), frozenset(), ENGINE)
    while wanted := needs(known, SWEEP):
        chosen = wanted[0].candidates if wanted[0].urgent else wanted[0].candidates[:1]
        points = list(itertools.chain.from_iterable(c.points for c in chosen))
        known = extended(known, [measured(point) for point in points])
    fewest = len(Range(1, 4096).rungs()) + SWEEP.held_out
    assert (len(known.measurements) > fewest) == goes_on


def test_noise_is_no_reason_to_go_on() -> None:
    """Errors within the uncertainty of the median: more points would not lower them."""

    def measured(point: WorkloadPoint) -> Measurement:
        true = 100.0 * (1 + 0.1 * ((point.num_tokens or 0) * 2654435761 % 97) / 97)
        return Measurement(point, tuple(true * f for f in (0.85, 0.9, 1.0, 1.1, 1.15)))

    known = Evidence(signature("tokens"), (), frozenset(), ENGINE)
    while wanted := needs(known, SWEEP):
        chosen = wanted[0].candidates if wanted[0].urgent else wanted[0].candidates[:1]
        points = list(itertools.chain.from_iterable(c.points for c in chosen))
        known = extended(known, [measured(point) for point in points])
    assert len(known.measurements) == len(Range(1, 4096).rungs()) + SWEEP.held_out


def test_a_constant_is_measured_once() -> None:
    known = sweeping("constant", lambda _: 7.0)
    assert [m.point.key for m in known.measurements] == ["constant"]


def test_a_wider_range_needs_the_rest_and_a_narrower_nothing() -> None:
    known = sweeping("tokens", smooth)
    narrower = SWEEP.model_copy(update={"tokens": 2048})
    assert needs(known, narrower) == []
    wider = SWEEP.model_copy(update={"tokens": 8192})
    (need,) = needs(known, wider)
    starting = [point.num_tokens for c in need.candidates for point in c.points]
    assert starting == [8192]
    later = sweeping("tokens", smooth, wider, begun=known.measurements)
    fresh = later.measurements[len(known.measurements) :]
    assert later.measurements[: len(known.measurements)] == known.measurements
    assert 1 + SWEEP.held_out <= len(fresh) <= 8
    assert needs(later, SWEEP) == []  # and the old range stays known


def test_an_interrupted_sweep_goes_on_where_it_stopped() -> None:
    whole = sweeping("tokens", smooth)
    for count in range(1, len(whole.measurements)):
        later = sweeping("tokens", smooth, begun=whole.measurements[:count])
        assert later.measurements[:count] == whole.measurements[:count]
        assert needs(later, SWEEP) == []
        keys = [m.point.key for m in later.measurements]
        assert len(keys) == len(set(keys))
        assert len(keys) <= len(whole.measurements) + 4


def test_a_grid_that_was_measured_before_is_used() -> None:
    powers = [tokens(2**n) for n in range(13)]
    grid = tuple(Measurement(point, (smooth(point),) * 3) for point in powers)
    known = sweeping("tokens", smooth, begun=grid)
    assert known.measurements[:13] == grid
    assert len(known.measurements) == 13 + SWEEP.held_out  # only the checks


def test_skipped_points_are_not_asked_for_again() -> None:
    known = sweeping("tokens", smooth, rounds=1)
    refused = tokens(4096).key
    left = tuple(m for m in known.measurements if m.point.key != refused)
    known = Evidence(known.signature, left, known.settled, ENGINE)
    for need in needs(known, SWEEP):
        assert refused not in {p.key for c in need.candidates for p in c.points}
    later = sweeping("tokens", smooth, begun=left)  # here the device does take it
    assert needs(later, SWEEP) == []


# -- surfaces -------------------------------------------------------------------


def attention(point: WorkloadPoint) -> float:
    """Work of attention: constant, per request, per pair of a new and a cached token."""
    assert point.batch is not None
    pairs = sum(r.query * (r.context + r.query / 2) for r in point.batch.requests)
    return 15.0 + 2.0 * point.batch.num_reqs + 4e-3 * pairs


def test_attention_covers_every_shape_of_batch() -> None:
    known = sweeping("batch", attention)
    shapes = {shape(m.point.batch) for m in known.measurements if m.point.batch}
    assert shapes == {"prefill", "decode", "uneven", "mixed"}
    histories = {m.point.batch.requests[0].context for m in known.measurements
                 if m.point.batch and shape(m.point.batch) == "prefill"}  # fmt: skip
    assert {0, 4000} < histories
    mixed = [m.point.batch for m in known.measurements if m.point.batch]
    assert any(b.prefills and b.decodes for b in mixed)
    assert any(len(b.prefills) > 1 for b in mixed)


def test_attention_is_predicted_everywhere() -> None:
    known = sweeping("batch", attention)
    batches = [Batch.decode(n, c) for n in (2, 5, 11, 30, 57) for c in (20, 90, 333, 1500, 3900)]
    batches += [Batch.prefill(q, h) for q in (10, 77, 300, 1111) for h in (0, 100, 999, 3000)]
    points = [WorkloadPoint.of("batch", batch) for batch in batches]
    assert error_at(known, attention, points) < SWEEP.target
    assert len(known.measurements) < 100


def test_depths_say_nothing_of_other_sizes() -> None:
    """Contexts bend, well predicted; 13 to 49 decodes, none a plane's first, take twice as long."""

    def device(point: WorkloadPoint) -> float:
        assert point.batch is not None
        bend = 1 + (point.batch.requests[0].context / 4000) ** 2
        return attention(point) * bend * (1 + (12 < point.batch.num_reqs < 50))

    known = sweeping("batch", device)
    decodes = [WorkloadPoint.of("batch", Batch.decode(n, c)) for n in (18, 22, 30, 43)
               for c in (50, 400, 2000)]  # fmt: skip
    assert error_at(known, device, decodes) < 0.1


def test_every_point_fits_the_engine() -> None:
    small: Any = SimpleNamespace(max_num_tokens=300, max_num_reqs=5, max_request_len=127)
    for kind, device in (("batch", attention), ("tokens", smooth)):
        known = sweeping(kind, device, engine=small)  # type: ignore[arg-type]
        assert needs(known, SWEEP) == []
        for measurement in known.measurements:
            assert fits(batch_of(measurement.point, small), small)


def test_experts_stay_possible() -> None:
    def device(point: WorkloadPoint) -> float:
        return 5.0 + 3.0 * (point.num_experts or 0) + 0.1 * (point.num_tokens or 0)

    known = sweeping("routing", device)
    places = {(m.point.num_tokens or 0, m.point.num_experts or 0) for m in known.measurements}
    assert all(2 <= experts <= min(16, 2 * tokens) for tokens, experts in places)
    assert {(1, 2), (4096, 2), (4096, 16)} < places
    points = [WorkloadPoint("routing", num_tokens=n, num_experts=e)
              for n in (9, 50, 700, 3000) for e in (2, 5, 9, 16)]  # fmt: skip
    assert error_at(known, device, points) < SWEEP.target


def test_an_even_line_of_a_plane_is_completed() -> None:
    """Killed between the points of a new size: its ends come first of all."""
    whole = sweeping("batch", attention)
    (decodes,) = [f for f in families(whole.signature, SWEEP, ENGINE) if f.name == "decode"]
    assert isinstance(decodes, Plane)
    begun = tuple(
        m for m in whole.measurements if m.point.batch and m.point.batch.num_reqs in (1, 8, 64)
    )
    half = extended(
        Evidence(whole.signature, begun, frozenset(m.point.key for m in begun), ENGINE),
        [Measurement(decodes.point((23, 300)), (1.0,) * 3)],
    )
    wanted = {p.key for need in needs(half, SWEEP) if need.family == "decode" and need.urgent
              for c in need.candidates for p in c.points}  # fmt: skip
    assert {"batch=23x1+16", "batch=23x1+4000"} <= wanted


# -- how much it is --------------------------------------------------------------


def test_most_points_bound_the_sweep() -> None:
    for kind, device in (("tokens", smooth), ("batch", attention)):
        most = most_points(signature(kind), SWEEP, ENGINE)  # type: ignore[arg-type]
        known = sweeping(kind, device)  # type: ignore[arg-type]
        assert 0 < len(known.measurements) <= most


@pytest.mark.parametrize("values", [[], [1, 8, 64], [5], [1, 9, 60, 5000]])
def test_a_rung_is_covered_by_what_stands_for_it(values: list[int]) -> None:
    standing = Range(1, 4096).standing(values)
    assert list(standing) == [1, 8, 65, 513, 4096]
    for rung, value in standing.items():
        assert value is None or value in values
        if value is not None and rung not in (1, 4096):
            assert rung / 1.5 <= value <= rung * 1.5
    assert Range(1, 4096).uncovered(values) == [r for r, v in standing.items() if v is None]


def test_shares_add_up() -> None:
    for axis in (Range(1, 4096), Range(0, 4000)):
        cuts = [axis.low, 7, 100, 333, 2000, axis.high]
        assert sum(itertools.starmap(axis.share, itertools.pairwise(cuts))) == pytest.approx(1)


# -- descriptions ---------------------------------------------------------------


def test_shipped_sweeps() -> None:
    assert isinstance(load_sweep("adaptive"), AdaptiveSweep)
    assert isinstance(load_sweep("quick"), Sweep)
    assert load_grid("quick") == load_sweep("quick")
    with pytest.raises(InputError, match="'adaptive' has no fixed points"):
        load_grid("adaptive")


def test_a_description_with_a_target_is_adaptive(tmp_path: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntarget: 2\ntokens: 64\nrequests: 4\ncontext: 64\n")
    with pytest.raises(InputError, match="target: Input should be less than 1"):
        load_sweep(str(path))
