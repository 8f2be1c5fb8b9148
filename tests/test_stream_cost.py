"""What steps cost at the engine's defaults: the fit to steps in a row."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from dooly_backend.database.records import HostStep, PartCost
from dooly_backend.regression.step_operations import Operations
from dooly_backend.regression.stream_cost import fit_stream_cost, time_us
from dooly_backend.simulation.execution import Mode
from dooly_backend.simulation.own_cost import Shapes, StreamedCost, own_cost
from dooly_backend.workload import Batch
from tests.stream_records import (
    GRAPH_LAYER_US,
    TRUTH,
    WAITS,
    by_hand,
    by_part,
    operations,
    shown,
    steps,
    with_lone_steps,
)


def test_what_steps_cost_is_found_again() -> None:
    measured = steps()
    found = by_part(fit_stream_cost(measured, operations(measured)))
    assert set(found) == set(TRUTH)
    for key, truth in TRUTH.items():
        cost = found[key]
        assert cost.mape < 0.5
        assert cost.share == pytest.approx(truth.share, abs=0.005)
        # Decodes have as many tokens as requests: what either costs is one thing.
        several = (cost.request_us + cost.token_us, truth.request_us + truth.token_us)
        assert several[0] == pytest.approx(several[1], abs=0.05)
        assert cost.step_us == pytest.approx(truth.step_us, abs=30)
        assert cost.layer_us == pytest.approx(truth.layer_us, abs=2)


def test_attention_is_not_fused() -> None:
    """Long contexts take what their attention takes, however much of the rest is fused."""
    measured = steps()
    found = by_part(fit_stream_cost(measured, operations(measured)))["full", "device"]
    short, long = (Operations(4000.0 + us, us) for us in (100.0, 9000.0))
    assert time_us(found, long) - time_us(found, short) == pytest.approx(8900.0)
    one = np.ones(1, np.int64)
    shapes = Shapes(one, one, one, np.array([Mode.FULL], np.int8))
    own = own_cost(None, 32, (found,)).of(shapes)
    for each in (short, long):
        device = own.device_us(np.array([each.us]), np.array([each.attention_us]))
        assert device[0] == pytest.approx(time_us(found, each))


def test_noise_and_outliers_move_it_little() -> None:
    draw = random.Random(3)

    def disturbed(us: float) -> float:
        return us * (1.6 if draw.random() < 0.08 else draw.gauss(1, 0.01))

    measured = steps(disturbed)
    costs = fit_stream_cost(measured, operations(measured))
    found = by_part(costs)
    held_out = [Batch.decode(32, 1500), Batch.prefill(400), Batch.prefill(2048)]
    for batch in held_out:
        truth = shown(batch, 32, float)
        device = time_us(found[truth.mode, "device"], by_hand(batch, 32))
        launch = time_us(found[truth.mode, "launch"], layers=32, requests=batch.num_reqs)
        assert max(device, launch) == pytest.approx(truth.median_us, rel=0.02)
    assert all(0 < cost.mape < 3 for cost in costs)


def test_only_what_the_device_bounded_tells_of_it() -> None:
    """Four layers of a decode are launched more slowly than they run."""
    measured = [step for step in steps() if step.num_layers == 4 and step.mode == "full"][:3]
    assert {c.part for c in fit_stream_cost(measured, operations(measured))} == {"launch"}


def test_lone_steps_tell_what_passes_before_the_device_begins() -> None:
    measured = with_lone_steps(steps(), random.Random(1))
    found = by_part(fit_stream_cost(measured, operations(measured)))
    full, pieces = found["full", "before"], found["piecewise", "before"]
    at_depth = full.step_us + 32 * full.layer_us
    assert at_depth == pytest.approx(WAITS["full"] + 32 * GRAPH_LAYER_US, rel=0.1)
    assert pieces.step_us + 32 * pieces.layer_us == pytest.approx(WAITS["piecewise"], rel=0.15)
    assert full.mape < 2.0
    # Steps without a graph are heavy, and run at another clock alone.
    assert ("eager", "before") not in found
    own = own_cost(None, 32, list(found.values()))
    shapes = Shapes(
        np.array([700, 200, 8]), np.array([700, 200, 8]), np.array([1, 1, 8]),
        np.array([Mode.EAGER, Mode.PIECEWISE, Mode.FULL], np.int8),
    )  # fmt: skip
    parts = own.of(shapes)
    assert parts.host_us[0] == pytest.approx(parts.host_us[1])
    launched = [time_us(found[mode, "launch"], layers=32, requests=int(n)) for mode, n in
                (("eager", 1), ("piecewise", 1), ("full", 8))]  # fmt: skip
    assert parts.host_us + parts.launch_us == pytest.approx(launched)


def test_lone_steps_of_whole_graphs_stand_for_those_of_others() -> None:
    """The launch of one depth says nothing of what passes first: all of it was taken for that."""
    parts = (
        PartCost("full", "device", 0.9),
        PartCost("full", "launch", step_us=3_400.0),
        PartCost("full", "before", step_us=1_700.0),
        PartCost("eager", "launch", step_us=28_000.0),
        PartCost("piecewise", "launch", step_us=1_000.0),
    )
    found = own_cost(None, 32, parts)
    assert isinstance(found, StreamedCost)
    assert found.modes[Mode.EAGER].host.step_us == 1_700.0
    assert found.modes[Mode.EAGER].launch.step_us == 26_300.0
    assert found.modes[Mode.PIECEWISE].host.step_us == 1_000.0


def test_what_passes_before_the_device_begins_is_no_more_than_the_launch() -> None:
    stream = (
        PartCost("full", "device", 0.9, 10.0),
        PartCost("full", "launch", step_us=500.0, request_us=2.0),
        PartCost("full", "before", step_us=900.0, request_us=1.0),
    )
    numbers = np.array([4])
    own = own_cost(None, 8, stream).of(
        Shapes(numbers, numbers, numbers, np.array([Mode.FULL], np.int8))
    )
    assert (own.host_us[0], own.launch_us[0]) == (504.0, 4.0)


def test_a_backend_that_waits_while_it_launches_hides_nothing() -> None:
    """FlashInfer's plan copies from the device: its launch ends when the step before does.

    What of it follows the plan is seen at the end of a row, where nothing is launched behind.
    """
    measured, rests = [], {"full": 1500.0, "piecewise": 4000.0, "eager": 17000.0}
    for step in steps():
        last = max(step.interval_us[-1] - rests[step.mode], 1.0)
        step = replace(step, interval_us=(*step.interval_us[:-1], last))
        waiting = tuple(
            max(launch, 0.99 * interval)
            for launch, interval in zip(step.launch_us, step.interval_us, strict=True)
        )
        measured.append(replace(step, launch_us=waiting, device_us=step.interval_us))
    found = by_part(fit_stream_cost(measured, operations(measured)))
    assert own_cost(None, 32, list(found.values())).launches_wait  # type: ignore[union-attr]
    others = fit_stream_cost(steps(), operations(steps()))
    assert not own_cost(None, 32, others).launches_wait  # type: ignore[union-attr]
    # Some whole graphs take less than their launch, which tells it.
    assert found["full", "launch"].steps
    assert found["eager", "launch"].step_us == pytest.approx(rests["eager"], rel=0.01)
    for mode in ("full", "eager"):
        assert found[mode, "device"].share == pytest.approx(TRUTH[mode, "device"].share, abs=0.01)
    for batch in (Batch.decode(32, 1500), Batch.prefill(2048), Batch.prefill(128)):
        truth = shown(batch, 32, float)
        device = time_us(found[truth.mode, "device"], by_hand(batch, 32))
        launch = time_us(found[truth.mode, "launch"], layers=32, requests=batch.num_reqs)
        assert max(device, launch) == pytest.approx(truth.median_us, rel=0.03)


def test_on_a_cpu_launching_is_computing() -> None:
    measured = [replace(step, launch_us=step.interval_us) for step in steps()]
    assert {c.part for c in fit_stream_cost(measured, operations(measured))} == {"launch"}


def test_noise_of_few_layers_does_not_reach_the_devices_share() -> None:
    """A host that was busy while four layers were timed made their steps twice as long."""
    measured = [
        replace(step, interval_us=tuple(2 * us for us in step.interval_us))
        if step.num_layers == 4
        else step
        for step in steps()
    ]
    found = by_part(fit_stream_cost(measured, operations(measured)))
    assert found["full", "device"].share == pytest.approx(0.92, abs=0.01)
    assert found["eager", "device"].share == pytest.approx(0.97, abs=0.01)


def test_few_steps_are_predicted_as_they_were() -> None:
    measured = [step for step in steps() if step.num_layers == 32 and step.mode == "full"][:3]
    cost = by_part(fit_stream_cost(measured, operations(measured)))["full", "device"]
    for step, us in zip(measured, operations(measured), strict=True):
        assert time_us(cost, us) == pytest.approx(step.median_us, rel=0.01)


def test_the_schedulers_part() -> None:
    hosts = [
        HostStep(n, (90.0, 100.0 + 2 * n, 999.0), (40.0 + 1.5 * n,)) for n in (1, 4, 16, 64, 256)
    ]
    found = by_part(fit_stream_cost([], [], hosts))
    assert set(found) == {("any", "schedule"), ("any", "output")}
    assert found["any", "schedule"].step_us == pytest.approx(100.0, rel=0.05)
    assert found["any", "schedule"].request_us == pytest.approx(2.0, rel=0.05)
    assert found["any", "output"].step_us == pytest.approx(40.0, rel=0.05)
    assert found["any", "output"].request_us == pytest.approx(1.5, rel=0.05)
