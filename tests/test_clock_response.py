"""The clock of a device under load: its response is found again in steps that follow it."""

from __future__ import annotations

import math
import random

import pytest

from dooly_backend.database.records import ClockStep
from dooly_backend.errors import InputError
from dooly_backend.regression.clock import (
    HEAVY_TOKENS,
    ClockResponse,
    cooled,
    fit_clock,
    heated,
    mean_heat,
)
from dooly_backend.simulation.device_clock import DeviceClock

TRUTH = ClockResponse(cool=0.82, slope=0.25, tau_s=0.15)


def steps_of(truth: ClockResponse, patterns: dict[str, list[bool]], noise: float = 0.0):
    """Heavy steps of 50 ms in a stream and light ones of 5 ms, integrated in slices of 0.1 ms."""
    draw = random.Random(1)
    for name, pattern in patterns.items():
        now = heat = 0.0
        for place, is_heavy in enumerate(pattern):
            begin, work = now, 0.0
            if is_heavy:
                while work < 0.050:
                    work += 1e-4 / truth.share(heat)
                    heat += (1 - heat) * 1e-4 / truth.tau_s
                    now += 1e-4
            else:
                now += 0.005
                heat *= math.exp(-0.005 / truth.tau_s)
            took = (now - begin) * (1 + noise * draw.gauss(0, 1))
            tokens = 2048 + 8 if is_heavy else 8
            yield ClockStep(name, place, tokens, begin * 1e6, took * 1e6)


PATTERNS = {
    "stream": [False] * 100 + [True] * 24 + [False] * 25 + [True],
    **{f"pause {n}": [False] * 100 + ([True] + [False] * n) * 12 for n in (1, 4, 16)},
}


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_response_is_found_again(noise: float) -> None:
    found = fit_clock(list(steps_of(TRUTH, PATTERNS, noise)))
    assert found.steps == 24 + 1 + 3 * 12
    assert found.mean_error < 0.005 + noise
    for heat in (0.0, 0.3, 0.6, 1.0):
        assert found.response.share(heat) == pytest.approx(TRUTH.share(heat), abs=0.012 + noise)
    assert found.response.tau_s == pytest.approx(TRUTH.tau_s, rel=0.25)


def test_a_simulated_clock_follows_the_same_steps() -> None:
    clock = DeviceClock(TRUTH)
    for step in steps_of(TRUTH, {"all": [False] * 50 + ([True] * 3 + [False] * 9) * 8}):
        if step.tokens >= HEAVY_TOKENS:
            took = clock.heavy(step.begin_us / 1e6, 0.050)
            assert took * 1e6 == pytest.approx(step.device_us, rel=0.01)


def test_a_steady_clock_takes_what_a_stream_takes() -> None:
    clock = DeviceClock(None)
    assert [clock.heavy(t, 0.05) for t in (0.0, 0.05, 3.0)] == [0.05] * 3


def test_heat_stays_between_nothing_and_one() -> None:
    assert cooled(1.0, 1e9, 0.1) == 0.0
    assert heated(0.0, 1e9, 0.1) == 1.0
    assert mean_heat(0.4, 0.0, 0.1) == 0.4
    assert mean_heat(0.0, 1e-6, 0.1) == pytest.approx(5e-6, rel=1e-3)
    assert 0.99 < mean_heat(0.0, 100.0, 0.1) < 1.0


def test_too_few_steps_say_what_is_needed() -> None:
    with pytest.raises(InputError, match="20 steps of at least 512 tokens"):
        fit_clock(list(steps_of(TRUTH, {"short": [False, True, True]})))
    broken = {f"pause {n}": [True, False] * 12 for n in (1, 2)}
    with pytest.raises(InputError, match="unbroken stream"):
        fit_clock(list(steps_of(TRUTH, broken)))
