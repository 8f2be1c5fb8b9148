"""How a call is timed: what runs before it, what is taken again, what a sample starts from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dooly_backend.database.records import Measurement
from dooly_backend.engines.base import CapturedCall
from dooly_backend.profiling.measure import Regime, Subject, measure
from dooly_backend.profiling.timer import Sample, Timer
from dooly_backend.workload import WorkloadPoint


class Script(Timer):
    """An engine and a timer that write down what happens.

    Samples come from a list, or from one for each call; negative ones are disturbed,
    and those that are `exposed` hold launches.
    """

    def __init__(self, samples: Sequence[float] = (), **of_calls: Sequence[float]) -> None:
        self.events: list[str] = []
        self.samples = list(samples)
        self.of_calls = {name: list(each) for name, each in of_calls.items()}
        self.exposed: set[float] = set()

    @contextmanager
    def running(self, context: Any) -> Iterator[None]:
        yield

    @contextmanager
    def routed(self, experts: Any) -> Iterator[None]:
        assert experts is None
        yield

    def call(self, called: CapturedCall) -> None:
        self.events.append(called.path)
        called()

    def flush(self) -> None:
        self.events.append("flush")

    def time(self, timed: Any, ahead_us: float = 0.0) -> Sample:
        self.events.append(f"time {timed.path}")
        timed()
        own = self.of_calls.get(timed.path, self.samples)
        sample = own.pop(0) if own else 10.0
        exposed = sample in self.exposed
        return Sample(abs(sample), disturbed=sample < 0 or exposed, exposed=exposed)


POINT = WorkloadPoint("tokens", num_tokens=16)


def measurements(script: Script, regime: Regime, *subjects: Subject) -> list[Measurement]:
    keyed = {(str(i), POINT): subject for i, subject in enumerate(subjects)}
    return list(measure(script, script, keyed, regime).values())  # type: ignore[arg-type]


def call(path: str, target: Any, *args: Any) -> CapturedCall:
    return CapturedCall(path, target, args, {}, None, 0)


def subject(name: str, sibling: bool = True, predecessor: bool = True) -> Subject:
    def nothing(*_: Any) -> None:
        return None

    return Subject(
        call(name, nothing),
        call(f"{name} predecessor", nothing) if predecessor else None,
        call(f"{name} sibling", nothing) if sibling else None,
    )


def test_weights_are_cold_and_code_is_warm() -> None:
    script = Script()
    measurements(script, Regime(repeats=1, warmups=0), subject("a"))
    assert script.events == ["flush", "a sibling", "a predecessor", "time a"]
    script = Script()
    measurements(script, Regime(repeats=1, warmups=0), subject("a", sibling=False))
    assert script.events == ["a", "flush", "a predecessor", "time a"]
    script = Script()
    measurements(script, Regime(repeats=1, warmups=0), subject("a", False, False))
    assert script.events == ["a", "flush", "time a"]


class Device(Script):
    """One whose clock gives way to work."""

    def repeats_until_hot(self, call: Any) -> int:
        call()
        return 2


def product(name: str, tokens: int, columns: int) -> CapturedCall:
    weight = torch.nn.Parameter(torch.zeros(columns, 4), requires_grad=False)
    return call(name, lambda *_: None, torch.zeros(tokens, 4), weight)


def test_long_calls_have_fewer_samples() -> None:
    script = Script(a=[100.0] * 8, b=[9.0] * 8)
    regime = Regime(repeats=5, warmups=1, spread=9, budget_us=250.0)
    long, short = measurements(script, regime, subject("a"), subject("b"))
    assert (len(long.samples_us), len(short.samples_us)) == (3, 5)
    assert [regime.samples(us) for us in (1000.0, 60.0, 10.0, 0.0)] == [3, 4, 5, 5]
    assert Regime(repeats=1).samples(1e9) == 1


def test_the_heaviest_product_of_a_large_step_runs_before_every_sample() -> None:
    regime = Regime(repeats=2, warmups=0)
    keyed = {("0", POINT): subject("a")}
    sample = ["flush", "a sibling", "a predecessor", "time a"]

    def events(*calls: CapturedCall) -> list[str]:
        script = Device()
        measure(script, script, keyed, regime, calls)  # type: ignore[arg-type]
        return script.events

    norm = call("norm", lambda *_: None, torch.zeros(512, 4))
    large = [norm, product("qkv", 512, 8), product("up", 512, 16)]
    assert events(*large) == ["up", *2 * ["up", "up", *sample]]
    # The head's weights are larger, but it sees one token of each request.
    assert events(*large, product("head", 1, 4096)) == ["up", *2 * ["up", "up", *sample]]
    assert events(norm, product("up", 256, 16)) == 2 * sample
    assert events() == 2 * sample


def test_subjects_take_turns_and_warm_ups_are_dropped() -> None:
    script = Script(a=[900.0, 10.0, 12.0, 14.0], b=[901.0, 11.0, 13.0, 15.0])
    found = measurements(script, Regime(repeats=3, warmups=1, spread=9), subject("a"), subject("b"))
    timed = [event for event in script.events if event.startswith("time")]
    turns = [timed[i : i + 2] for i in range(0, 8, 2)]
    assert [sorted(turn) for turn in turns] == [["time a", "time b"]] * 4
    assert [m.samples_us for m in found] == [(10, 12, 14), (11, 13, 15)]
    assert not any(m.unstable for m in found)


def test_a_call_that_lost_its_processor_is_timed_again() -> None:
    script = Script([-90.0, 10.0, 11.0, -91.0, -92.0, 12.0])
    (found,) = measurements(script, Regime(repeats=3, warmups=0, spread=9), subject("a"))
    assert found.samples_us == (10, 11, 12)
    assert script.events[:4] == ["flush", "a sibling", "a predecessor", "time a"]
    assert script.events[4:8] == script.events[:4]  # as in a step, again
    script = Script([-90.0, -80.0, -85.0, 10.0])
    regime = Regime(repeats=2, warmups=0, spread=9, attempts=3)
    (found,) = measurements(script, regime, subject("a"))
    assert found.samples_us == (80, 10)  # the quickest of three disturbed ones


def test_a_disturbed_point_is_measured_again() -> None:
    noisy, quiet = [10.0, 10.0, 20.0, 20.0, 20.0], [11.0] * 5
    script = Script([*noisy, *quiet])
    (found,) = measurements(script, Regime(repeats=5, warmups=0), subject("a"))
    assert (found.samples_us, found.unstable) == (tuple(quiet), False)
    assert not script.samples


def test_only_the_disturbed_point_is_measured_again() -> None:
    script = Script(a=[10.0, 10.0, 20.0, 20.0, 20.0, *[11.0] * 5], b=[5.0] * 5)
    regime = Regime(repeats=5, warmups=0)
    found = measurements(script, regime, subject("a"), subject("b"))
    assert [m.samples_us for m in found] == [(11.0,) * 5, (5.0,) * 5]
    assert not any(script.of_calls.values())


def test_no_subject_keeps_its_place_among_the_others() -> None:
    """A place can take a microsecond longer than another, as events on a GPU do."""
    script = Script()
    subjects = [subject(name) for name in "abcd"]
    measurements(script, Regime(repeats=20, warmups=0), *subjects)
    timed = [event for event in script.events if event.startswith("time")]
    for name in "abcd":
        places = [i % 4 for i, event in enumerate(timed) if event == f"time {name}"]
        assert len(places) == 20
        assert set(places) == {0, 1, 2, 3}


def test_a_point_that_stays_disturbed_is_marked() -> None:
    best = [10.0, 10.0, 12.0, 12.0, 12.0]
    worse = [10.0, 10.0, 20.0, 20.0, 20.0]
    script = Script([*worse, *best, *worse])
    (found,) = measurements(script, Regime(repeats=5, warmups=0, rounds=3), subject("a"))
    assert (found.samples_us, found.unstable) == (tuple(best), True)
    assert not script.samples


def test_a_point_whose_samples_hold_launches_is_measured_again_and_else_marked() -> None:
    """However close together they are: the host's launches take the same time again and again."""
    regime = Regime(repeats=2, warmups=0, rounds=2, attempts=2)
    script = Script([205.0, 205.0, 205.0, 206.0, 15.0, 16.0])
    script.exposed = {205.0, 206.0}
    (found,) = measurements(script, regime, subject("a"))
    assert (found.samples_us, found.unstable) == ((15.0, 16.0), False)
    script = Script([205.0] * 8)
    script.exposed = {205.0}
    (found,) = measurements(script, regime, subject("a"))
    assert (found.samples_us, found.unstable) == ((205.0, 205.0), True)
    assert not script.samples


def test_arguments_are_fresh_for_every_sample() -> None:
    """A call may write into its arguments, and others of its kind change nothing of them."""
    seen: list[list[float]] = []
    argument, repeated = torch.zeros(3), torch.zeros(1).expand(4)

    def writes(tensor: torch.Tensor, other: torch.Tensor) -> None:
        seen.append(tensor.tolist())
        tensor += 1

    called = CapturedCall("a", writes, (argument,), {"other": repeated}, None, 0)
    script = Script()
    measurements(script, Regime(repeats=3, warmups=1), Subject(called, None, None))
    # Each sample warms the code with the call itself, which also writes.
    timed = seen[1::2]
    assert timed == [[0.0] * 3] * 4


def test_weights_that_an_operation_is_given_stay_cold() -> None:
    """Restoring them would write them into the cache right before the call."""
    weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    reads: list[torch.Tensor] = []
    called = CapturedCall("a", lambda x, w: reads.append(w), (torch.ones(4), weight), {}, None, 0)
    version = weight._version
    measurements(Script(), Regime(repeats=2, warmups=0), Subject(called, None, None))
    assert weight._version == version  # nobody wrote it
    assert all(read is weight for read in reads)


def test_on_a_busy_host_nothing_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([-5.0, -6.0, -7.0])
    monkeypatch.setattr(script, "is_calm", False)
    call = CapturedCall("a", lambda: None, (), {}, None, 0)
    point = WorkloadPoint("tokens", num_tokens=1)
    regime = Regime(repeats=3, warmups=0)
    found = measure(script, script, {("h", point): Subject(call, None, call)}, regime)
    assert found["h", point].samples_us == (5.0, 6.0, 7.0)
    assert not script.samples


@pytest.mark.parametrize("inputs_age", [True, False])
def test_inputs_are_put_in_place_ahead_of_the_predecessor_or_behind_it(inputs_age: bool) -> None:
    class Ageing(Script):
        def pass_by(self) -> None:
            self.events.append("pass by")

    seen: list[list[float]] = []
    argument = torch.zeros(2)

    def writes(tensor: torch.Tensor) -> None:
        tensor += 1

    called = CapturedCall("a", writes, (argument,), {}, None, 0)
    ahead = CapturedCall("b", lambda: seen.append(argument.tolist()), (), {}, None, 0)
    like = CapturedCall("c", lambda: None, (), {}, None, 0)
    script = Ageing()
    script.inputs_age = inputs_age
    measurements(script, Regime(repeats=2, warmups=0), Subject(called, ahead, like))
    assert script.events == ["flush", "c", "pass by", "b", "time a"] * 2
    assert seen == [[0.0, 0.0], [0.0, 0.0] if inputs_age else [1.0, 1.0]]


def test_a_measurement_tells_what_all_its_samples_took() -> None:
    """Those that are taken again, rounds that are not kept, warm-ups, and calls around it."""
    pause = 0.002
    calls: list[str] = []

    def slow(name: str) -> CapturedCall:
        def run() -> None:
            calls.append(name)
            time.sleep(pause)

        return call(name, run)

    script = Script([-1.0, 1.0, 1.0, 9.0, 1.0, 1.0, 1.0])  # disturbed; a round far apart
    regime = Regime(repeats=2, warmups=1, rounds=2)
    (found,) = measurements(script, regime, Subject(slow("a"), slow("p"), slow("s")))
    assert found.samples_us == (1.0, 1.0)
    assert calls.count("a") == 4 + 3
    assert found.timing_us is not None
    assert found.timing_us >= 3 * 7 * pause * 1e6
    assert found == Measurement(POINT, (1.0, 1.0))  # what it cost is no part of what it says
