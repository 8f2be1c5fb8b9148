"""The clock of a device under load: its response is found again in steps that follow it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dooly_backend.database import Database
from dooly_backend.database.check import check_file
from dooly_backend.database.merge import merge
from dooly_backend.database.records import ClockStep
from dooly_backend.errors import InputError
from dooly_backend.regression.clock import HEAVY_TOKENS, ClockResponse, fit_clock
from dooly_backend.simulation.device_clock import DeviceClock
from tests.sample_records import H200, QWEN

TRUTH = ClockResponse(0.82, 0.25, 0.04, 200.0, light=0.05, light_token=0.0004)
SLICE_S = 1e-4


def steps_of(
    truth: ClockResponse,
    patterns: dict[tuple[str, int], list[bool]],
    noise: float = 0.0,
    layers: int = 32,
) -> Iterator[ClockStep]:
    """Heavy steps of 50 ms in a stream and light ones of 5 ms, integrated in slices.

    Of fewer layers than 32 they are shorter.
    """
    draw = random.Random(1)
    share = layers / 32
    for (name, requests), pattern in patterns.items():
        now = heat = 0.0
        for place, is_heavy in enumerate(pattern):
            begin, work = now, 0.0
            tokens = 2048 if is_heavy else requests
            while work < share * (0.050 if is_heavy else 0.005):
                work += SLICE_S / (
                    truth.share(heat) if is_heavy else truth.light_share(heat, tokens)
                )
                heat += (truth.target(tokens) - heat) * SLICE_S / truth.tau_s
                now += SLICE_S
            took = (now - begin) * (1 + noise * draw.gauss(0, 1))
            now = begin + took
            yield ClockStep(
                layers, f"{requests} requests, {name}", place, tokens, begin * 1e6, took * 1e6
            )


REST = [False] * 60
PATTERNS = {
    (name, requests): REST + pattern
    for requests in (8, 64, 128)
    for name, pattern in {
        "stream": [True] * 16,
        **{f"pause {n}": ([True] + [False] * n) * 10 for n in (1, 4, 16)},
    }.items()
}


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_response_is_found_again(noise: float) -> None:
    deep = steps_of(TRUTH, PATTERNS, noise)
    shallow = steps_of(TRUTH, {("short", 8): [False] * 480 + [True] * 40}, noise, layers=4)
    found = fit_clock([*deep, *shallow])
    assert found.steps == 3 * (16 + 3 * 10) + 40
    assert found.mean_error < 0.006 + noise
    for heat in (0.0, 0.3, 0.6, 1.0):
        assert found.response.share(heat) == pytest.approx(TRUTH.share(heat), abs=0.015 + noise)
    assert found.response.tau_s == pytest.approx(TRUTH.tau_s, rel=0.3)
    assert found.response.warm_tokens == pytest.approx(TRUTH.warm_tokens, rel=0.3)
    for tokens in (8, 128):
        light = found.response.light_share(1.0, tokens)
        assert light == pytest.approx(TRUTH.light_share(1.0, tokens), abs=0.02 + noise)


def test_light_steps_that_were_never_behind_heavy_ones_tell_nothing() -> None:
    found = fit_clock(list(steps_of(TRUTH, {("stream", 8): REST + [True] * 40})))
    assert found.response.light == found.response.light_token == 0.0


def test_a_database_keeps_the_steps_it_is_found_in(tmp_path: Path) -> None:
    deep = list(steps_of(TRUTH, PATTERNS))
    shallow = list(steps_of(TRUTH, {("short", 8): [True] * 40}, layers=4))
    path, other = tmp_path / "a.db", tmp_path / "b.db"
    with Database.open(path, create=True) as database:
        environment = database.add_environment(H200)
        ids = database.add_configuration(QWEN, (), environment), environment
        assert database.clock_steps(*ids) == []
        database.record_clock(*ids, [*shallow, *deep])
        database.record_clock(*ids, shallow)  # again: in the place of what was there
        kept = database.clock_steps(*ids)
        with pytest.raises(InputError, match="microseconds, finite"):
            database.record_clock(*ids, [replace(shallow[0], device_us=math.nan)])
        assert database.clock_steps(*ids) == kept
    stored = [(s.num_layers, s.pattern, s.tokens, round(s.device_us, 1)) for s in kept]
    assert stored == [
        (s.num_layers, s.pattern, s.tokens, round(s.device_us, 1)) for s in [*shallow, *deep]
    ]
    assert not check_file(path).problems
    merge(other, [path])
    merge(other, [path])
    with Database.open(other) as database:
        assert database.clock_steps(1, 1) == kept


def test_a_simulated_clock_follows_the_same_steps() -> None:
    clock = DeviceClock(TRUTH)
    pattern = {("all", 64): REST + ([True] * 3 + [False] * 9) * 8}
    for step in steps_of(TRUTH, pattern):
        steady = 0.050 if step.tokens >= HEAVY_TOKENS else 0.005
        took = clock.step(step.begin_us / 1e6, steady, step.tokens)
        assert took * 1e6 == pytest.approx(step.device_us, rel=0.02)


def test_an_idle_device_cools() -> None:
    clock = DeviceClock(TRUTH)
    fresh = clock.step(0.0, 0.05, 2048)
    assert fresh == pytest.approx(0.0461, rel=0.01)
    assert clock.step(fresh, 0.05, 2048) > 1.05 * fresh
    assert clock.step(10.0, 0.05, 2048) == pytest.approx(fresh)


def test_heat_stays_between_nothing_and_its_target() -> None:
    assert TRUTH.after(1.0, 1e9) == 0.0
    assert TRUTH.after(0.0, 1e9, 1.0) == 1.0
    assert TRUTH.mean(0.4, 0.0) == 0.4
    assert TRUTH.mean(0.0, 1e-6) == pytest.approx(1e-6 / 2 / TRUTH.tau_s, rel=1e-3)
    assert 0.99 < TRUTH.mean(0.0, 100.0) < 1.0
    assert [TRUTH.target(n) for n in (0, 100, 300, 512)] == [0.0, 0.5, 1.0, 1.0]
    assert ClockResponse(0.8, 0.2, 0.1).target(511) < 1e-6


def test_too_few_steps_say_what_is_needed() -> None:
    short = {("short", 8): [False] + [True] * 6}
    with pytest.raises(InputError, match="20 steps of at least 512 tokens"):
        fit_clock(list(steps_of(TRUTH, short)))
    broken = {(f"pause {n}", 8): [True, False] * 12 for n in (1, 2)}
    with pytest.raises(InputError, match="unbroken stream"):
        fit_clock(list(steps_of(TRUTH, broken)))
