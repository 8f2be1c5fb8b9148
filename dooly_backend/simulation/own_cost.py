"""What a step costs beyond its operations: one small piece, to be replaced by what was measured.

The parts of a step differ in when they count. On a CPU the host computes the
operations itself, so everything adds up. On a GPU the host launches kernels
while the device runs earlier ones: a step lasts as long as the slower of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dooly_backend.database.records import StepCost
from dooly_backend.simulation.execution import Mode
from dooly_backend.simulation.records import Integers, Numbers


@dataclass(frozen=True)
class Shapes:
    """What a step's own cost may depend on, one entry per step."""

    tokens: Integers  # new tokens
    padded: Integers  # with the padding of graphs
    requests: Integers
    mode: npt.NDArray[np.int8]  # execution.Mode

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class OwnTimes:
    """Microseconds per step.

    `serial_us` adds to the operations. `launch_us` is what the host needs to
    launch them: the device works meanwhile and cannot be done earlier. `host_us`
    comes before the launch and `output_us` after the result (`StepTime`).
    """

    serial_us: Numbers
    launch_us: Numbers
    host_us: Numbers
    output_us: Numbers


class OwnCost(Protocol):
    """The cost of steps beyond their operations."""

    def of(self, shapes: Shapes) -> OwnTimes: ...


@dataclass(frozen=True)
class NoCost:
    """Operations alone: the forward-only prediction."""

    def of(self, shapes: Shapes) -> OwnTimes:
        nothing = np.zeros(len(shapes))
        return OwnTimes(nothing, nothing, nothing, nothing)


@dataclass(frozen=True)
class Affine:
    """``step + request * requests + token * tokens``, microseconds.

    `curve` adds straight lines through (tokens, microseconds), from (0, 0) to
    the last point, and what that point says beyond it.
    """

    step_us: float = 0.0
    request_us: float = 0.0
    token_us: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()

    def of(self, shapes: Shapes) -> Numbers:
        us = self.step_us + self.request_us * shapes.requests + self.token_us * shapes.tokens
        if self.curve:
            places, values = zip((0.0, 0.0), *self.curve, strict=True)
            us = us + np.interp(shapes.tokens, places, values)
        return us


@dataclass(frozen=True)
class HostCost:
    """The host's parts of a step, each affine in its requests and tokens.

    `launch` by execution mode: replaying a graph is one launch, without one
    every operation is.
    """

    serial: Affine = Affine()
    launch: Mapping[Mode, Affine] = field(default_factory=dict)
    host: Affine = Affine()
    output: Affine = Affine()

    def of(self, shapes: Shapes) -> OwnTimes:
        launch = np.zeros(len(shapes))
        for mode, cost in self.launch.items():
            launch = np.where(shapes.mode == mode, cost.of(shapes), launch)
        return OwnTimes(
            self.serial.of(shapes), launch, self.host.of(shapes), self.output.of(shapes)
        )


def own_cost(fitted: StepCost | None, layers: int) -> OwnCost:
    """What a profile says: its fitted step cost, for a model of `layers` layers; else nothing."""
    if fitted is None:
        return NoCost()
    return HostCost(
        serial=Affine(fitted.step_us + fitted.layer_us * layers, fitted.request_us),
    )
