"""What a step costs beyond its operations: one small piece, to be replaced by what was measured.

The parts of a step differ in when they count. On a CPU the host computes the
operations itself, so everything adds up. On a GPU the host launches kernels
while the device runs earlier ones: a step lasts as long as the slower of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dooly_backend.database.records import PartCost, StepCost, StepMode
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
    comes before the launch and `output_us` after the result (`StepTime`). The
    device takes attention and collectives, `share` of the other operations (None: all) and
    `serial_us`.
    """

    serial_us: Numbers
    launch_us: Numbers
    host_us: Numbers
    output_us: Numbers
    share: Numbers | None = None

    def device_us(self, operations_us: Numbers, whole_us: Numbers | float = 0.0) -> Numbers:
        """What the device takes; `operations_us` are each step's, of them `whole_us` not fused."""
        us = operations_us
        if self.share is not None:
            us = whole_us + (operations_us - whole_us) * self.share
        return np.maximum(us + self.serial_us, 0.0)


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


@dataclass(frozen=True)
class ModeCost:
    """A step of one execution mode.

    The device takes attention, `share` of the other operations, and `gap_us`. The host
    needs `host` before its first kernel is out, and goes on launching for `launch`.
    """

    share: float = 1.0
    gap_us: float = 0.0
    host: Affine = Affine()
    launch: Affine = Affine()


@dataclass(frozen=True)
class StreamedCost:
    """What steps in a row took, by execution mode, and the scheduler's part of any step."""

    modes: Mapping[Mode, ModeCost]
    schedule: Affine = Affine()
    output: Affine = Affine()
    #: Whether a launch waits until the device is done with the step before, as some backends
    #: read numbers back to plan the next step by.
    launches_wait: bool = False

    def of(self, shapes: Shapes) -> OwnTimes:
        share, gap = np.ones(len(shapes)), np.zeros(len(shapes))
        host, launch = self.schedule.of(shapes), np.zeros(len(shapes))
        for mode, cost in self.modes.items():
            here = shapes.mode == mode
            share, gap = np.where(here, cost.share, share), np.where(here, cost.gap_us, gap)
            host = host + np.where(here, cost.host.of(shapes), 0.0)
            launch = np.where(here, cost.launch.of(shapes), launch)
        return OwnTimes(gap, launch, host, self.output.of(shapes), share)


MODE_NAMES: dict[Mode, StepMode] = {
    Mode.EAGER: "eager",
    Mode.PIECEWISE: "piecewise",
    Mode.FULL: "full",
}


def own_cost(fitted: StepCost | None, layers: int, stream: Sequence[PartCost] = ()) -> OwnCost:
    """What a profile says, for a model of `layers` layers.

    What was fitted to steps in a row (`stream`), where the device bounded some of
    them, else to steps that were waited for (`fitted`), else nothing.
    """
    if any(part.part == "device" for part in stream):
        return _streamed(stream, layers)
    if fitted is None:
        return NoCost()
    return HostCost(
        serial=Affine(fitted.step_us + fitted.layer_us * layers, fitted.request_us),
    )


def _streamed(stream: Sequence[PartCost], layers: int) -> StreamedCost:
    """What passes before the device begins is part of the launch, and not in addition to it.

    A mode in which the launch bounded every step has the other modes' mean share. One whose
    lone steps told nothing has what passes before another mode's steps of several launches,
    or before whole graphs: the host prepares them alike.
    """
    parts = {(part.mode, part.part): part for part in stream}
    shares = [part.share for part in stream if part.part == "device"]
    nothing = PartCost("any", "launch")
    modes = {}
    for mode, name in MODE_NAMES.items():
        device = parts.get((name, "device"), PartCost("any", "device", float(np.mean(shares))))
        launch = _at(parts.get((name, "launch"), nothing), layers)
        known = parts.get((name, "before"))
        if known is None and mode != Mode.FULL:
            others = [parts.get((other, "before")) for other in ("piecewise", "eager", "full")]
            known = next((part for part in others if part is not None), None)
        before = _unmeasured(parts.get((name, "launch"), nothing), layers, mode)
        if known is not None:
            most = _at(known, layers)
            before = Affine(
                min(most.step_us, launch.step_us), min(most.request_us, launch.request_us)
            )
        rest = Affine(launch.step_us - before.step_us, launch.request_us - before.request_us)
        modes[mode] = ModeCost(device.share, device.step_us, before, rest)
    schedule, output = (parts.get(("any", name), nothing) for name in ("schedule", "output"))
    return StreamedCost(
        modes,
        Affine(schedule.step_us, schedule.request_us),
        Affine(output.step_us, output.request_us),
        any(_waits(parts, name) for name in MODE_NAMES.values()),
    )


def _waits(parts: Mapping[tuple[Any, Any], PartCost], mode: StepMode) -> bool:
    """Whether the device bounded steps of a mode, and no launch of them ended before it did."""
    device, launch = parts.get((mode, "device")), parts.get((mode, "launch"))
    return device is not None and launch is not None and device.steps > 0 and launch.steps == 0


def _at(part: PartCost, layers: int) -> Affine:
    """A part of a step at so many layers."""
    return Affine(part.step_us + part.layer_us * layers, part.request_us)


def _unmeasured(launch: PartCost, layers: int, mode: Mode) -> Affine:
    """What passes before the device begins where no lone step was timed.

    What does not grow with the layers; of a whole graph all of it, which is out at once.
    """
    return _at(launch, layers if mode == Mode.FULL else 0)
