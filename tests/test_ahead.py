"""What runs ahead of a timed call: whole layers, where they are asked for."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dooly_backend.engines.base import CapturedCall
from dooly_backend.profiling.ahead import Filler, by_layer
from dooly_backend.profiling.measure import Regime, Subject
from dooly_backend.profiling.timer import Sample, Timer


def call(path: str, tokens: int = 0) -> CapturedCall:
    """A call; with tokens, a product of 4 columns."""
    weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    args = (torch.zeros(tokens, 4), weight) if tokens else ()
    return CapturedCall(path, lambda *_: None, args, {}, None, 0)


def step(tokens: int, layers: int = 2) -> list[CapturedCall]:
    inside = [
        each
        for i in range(layers)
        for each in (call(f"model.layers.{i}.norm"), call(f"model.layers.{i}.up", tokens))
    ]
    return [call("model.embed"), *inside, call("head", 1)]


class Hot(Timer):
    """A device on which two rounds of anything make it hot."""

    def flush(self) -> None:
        raise AssertionError("not asked for")

    def time(self, call: Any, ahead_us: float = 0.0) -> Sample:
        raise AssertionError("not asked for")

    def repeats_until_hot(self, call: Any) -> int:
        call()
        return 2


def filled(calls: list[CapturedCall], **options: Any) -> tuple[list[str], float]:
    """What runs ahead of the second of two samples, and for how long it is said to."""
    ran: list[str] = []
    filler = Filler(lambda each: ran.append(each.path), Hot(), calls, **options)
    filler()
    ran.clear()
    return ran, filler()


def test_whole_layers_take_turns() -> None:
    (zero, one, two) = ([f"model.layers.{i}.norm", f"model.layers.{i}.up"] for i in range(3))
    assert filled(step(512, layers=3), ahead="layer") == ([*two, *zero], Hot.BUSY_US)
    assert filled(step(512, layers=2), ahead="layer") == ([*zero, *one], Hot.BUSY_US)


def test_the_heaviest_product_alone() -> None:
    heavier = call("model.layers.1.down", 512)
    heavier.args[1].data = torch.zeros(8, 4)
    calls = [*step(512), heavier]
    assert filled(calls) == (["model.layers.1.down"] * 2, Hot.BUSY_US)
    assert by_layer(calls)[1][-1] is heavier


def test_calls_outside_layers_are_no_layer() -> None:
    assert filled([call("head", 512)], ahead="layer") == (["head", "head"], Hot.BUSY_US)


@pytest.mark.parametrize("ahead", ["product", "layer"])
def test_small_steps_need_nothing_ahead(ahead: str) -> None:
    assert filled(step(256), ahead=ahead) == ([], 0.0)
    assert filled([], ahead=ahead) == ([], 0.0)


def test_the_lead_in_is_a_layer_of_the_step() -> None:
    _, norm, up, like, called, _ = step(16)
    subject = Subject(called, like, up, between=(like,))
    assert subject.lead_in("layer") == [up, like]
    subject = Subject(called, like, norm, between=(up, like))
    assert subject.lead_in("layer") == [norm, up, like]
    assert subject.lead_in("product") == [norm, like]
    assert Subject(called, like, None).lead_in("layer") == [like]
    assert Regime().ahead == "product"
