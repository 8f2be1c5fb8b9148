"""The time of engine steps: the configuration's call graph, walked once into arrays.

A step takes the sum of count times prediction over its signatures, and the
step's own cost. Signatures that depend on a number alone (tokens, requests)
are summed into one table each, filled as numbers occur; what is left per step
is a look-up in each and a prediction per attention signature.

    timer = StepModel.of(load_bundle("bundle.joblib").configuration("SmolLM-135M"))
    timer.time(Batch.parse("1x512+0,8x1+1024"))
    timer.times(Batches.of(batches))          # many at once
    timer.parts_us(Batches.of(batches))       # by group: attention, linear, ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dooly_backend.database.records import Configuration, Occurrence, PartCost, StepCost
from dooly_backend.regression.clock import ClockResponse
from dooly_backend.regression.prediction import SignaturePredictor
from dooly_backend.simulation.execution import Execution
from dooly_backend.simulation.own_cost import NoCost, OwnCost, Shapes, own_cost
from dooly_backend.simulation.records import Batches, Integers, Numbers, StepTime, StepTimes
from dooly_backend.workload import Batch, PointKind

Flags = npt.NDArray[np.bool_]
Predicted = tuple[Numbers, Flags]  # microseconds, and whether outside the profiled range

HOST = "host"
GROUPS = ("attention", "linear", "moe", "collectives", "other")
_MATRIX_PRODUCTS = ("linear", "::mm", "addmm", "matmul", "lmhead", "logitsprocessor")
_MEMO = 65_536  # single steps that are remembered


class Predictor(Protocol):
    """What one call of a signature takes, for many batches at once."""

    def predict(self, signature: str, batches: Batches) -> Predicted: ...


class Fitted(Protocol):
    """What a bundle knows of one configuration (`BundleConfiguration`)."""

    @property
    def configuration(self) -> Configuration: ...
    @property
    def occurrences(self) -> Sequence[Occurrence]: ...
    @property
    def step_cost(self) -> StepCost | None: ...
    @property
    def stream_cost(self) -> Sequence[PartCost]: ...
    @property
    def predictors(self) -> Mapping[str, SignaturePredictor]: ...


@dataclass(frozen=True)
class BundlePredictor:
    """Predictions of a bundle's regressors; signatures with the same features share them."""

    predictors: Mapping[str, SignaturePredictor]

    def predict(self, signature: str, batches: Batches) -> Predicted:
        found = self.predictors[signature].predict_batches(batches)
        return found.us, found.extrapolated


@dataclass(frozen=True)
class Part:
    """One signature of a step: how often a step runs it, and which group it counts to."""

    signature: str
    kind: PointKind
    group: str
    count: int


def group_of(occurrence: Occurrence) -> str:
    """The group of `GROUPS` that an occurrence counts to."""
    name = f"{occurrence.signature.name} {occurrence.module_class}".lower()
    if occurrence.signature.kind == "routing":
        return "moe"
    if occurrence.signature.is_collective:
        return "collectives"
    if occurrence.signature.is_attention:
        return "attention"
    if any(word in name for word in _MATRIX_PRODUCTS):
        return "linear"
    return "other"


def parts_of(occurrences: Iterable[Occurrence]) -> tuple[Part, ...]:
    """The call graph as one part per signature and group."""
    counts: Counter[Part] = Counter()
    for occurrence in occurrences:
        signature = occurrence.signature
        part = Part(signature.hash, signature.kind, group_of(occurrence), 0)
        counts[part] += occurrence.count
    return tuple(replace(part, count=count) for part, count in counts.items())


class StepModel:
    """Times of one configuration's steps: a `ManyStepTimer`.

    The order of a batch's requests does not matter. `execution` says how the
    engine pads steps; `cost` what they take beyond their operations; `clock` how
    the device's clock gives way under load, None where it is steady.
    """

    clock: ClockResponse | None = None

    def __init__(
        self,
        parts: Sequence[Part],
        predictor: Predictor,
        cost: OwnCost | None = None,
        execution: Execution | None = None,
    ) -> None:
        self.cost = cost or NoCost()
        self.execution = execution or Execution()
        self.groups = tuple(g for g in GROUPS if any(part.group == g for part in parts))
        # No compiler fuses these with what lies around them.
        self._whole = np.array([g in ("attention", "collectives") for g in self.groups], bool)
        self._predictor = predictor
        self._by_batch = [part for part in parts if part.kind == "batch"]
        self._by_tokens = self._table(parts, ("tokens", "routing", "constant"), _of_tokens)
        self._by_requests = self._table(parts, ("requests",), _of_requests)
        self._one = lru_cache(_MEMO)(self._time)

    @classmethod
    def of(
        cls, fitted: Fitted, execution: Execution | None = None, cost: OwnCost | None = None
    ) -> StepModel:
        """The steps of a configuration of a bundle; `cost` is by default what its profile says."""
        if cost is None:
            layers = fitted.configuration.layers_run
            cost = own_cost(fitted.step_cost, layers, fitted.stream_cost)
        predictor = BundlePredictor(fitted.predictors)
        return cls(parts_of(fitted.occurrences), predictor, cost, execution)

    @property
    def launches_wait(self) -> bool:
        """Whether a launch waits until the device is done with the step before (`StreamedCost`)."""
        return getattr(self.cost, "launches_wait", False)

    def forward_only(self) -> StepModel:
        """The same without the step's own cost."""
        return self.with_cost(NoCost())

    def with_cost(self, cost: OwnCost) -> StepModel:
        """The same with another cost of its own; what is known of the operations is shared."""
        twin = object.__new__(StepModel)
        twin.__dict__.update(self.__dict__)
        twin.cost = cost
        twin._one = lru_cache(_MEMO)(twin._time)
        return twin

    def with_clock(self, clock: ClockResponse | None) -> StepModel:
        """The same on a device whose clock gives way like this."""
        twin = self.with_cost(self.cost)
        twin.clock = clock
        return twin

    # -- times -----------------------------------------------------------------------------

    def time(self, batch: Batch) -> StepTime:
        """One step; remembered by the lengths of its requests."""
        return self._one(batch)

    def times(self, batches: Batches) -> StepTimes:
        """Many steps at once, microseconds. No batch may be empty."""
        shapes = self.shapes(batches)
        us, extrapolated = self._operations(batches, shapes)
        own = self.cost.of(shapes)
        device = own.device_us(us.sum(axis=0), us[self._whole].sum(axis=0))
        return StepTimes(
            device, own.host_us, own.output_us, extrapolated, own.launch_us, shapes.tokens
        )

    def parts_us(self, batches: Batches) -> Mapping[str, Numbers]:
        """Where the steps' time goes: per group one entry per step; `host` is the steps' own."""
        shapes = self.shapes(batches)
        us, _ = self._operations(batches, shapes)
        own = self.cost.of(shapes)
        if own.share is not None:
            us[~self._whole] *= own.share
        waits = np.maximum(0.0, own.launch_us - us.sum(axis=0) - own.serial_us)
        host = own.serial_us + own.host_us + own.output_us + waits
        return {**dict(zip(self.groups, us, strict=True)), HOST: host}

    def _time(self, batch: Batch) -> StepTime:
        times = self.times(Batches.of([batch]))
        return StepTime(
            float(times.device_us[0]),
            float(times.host_us[0]),
            float(times.output_us[0]),
            bool(times.extrapolated[0]),
            0.0 if times.launch_us is None else float(times.launch_us[0]),
            0 if times.tokens is None else int(times.tokens[0]),
        )

    def shapes(self, batches: Batches) -> Shapes:
        """Tokens, padding, requests and execution mode of each step."""
        tokens, requests = batches.total(batches.query), batches.num_reqs
        longest = np.maximum.reduceat(batches.query, batches.starts)
        mode, padded = self.execution.modes(tokens, requests, longest)
        return Shapes(tokens, padded, requests, mode)

    def _operations(self, batches: Batches, shapes: Shapes) -> tuple[Numbers, Flags]:
        """Microseconds by (group, step), and which steps are extrapolated."""
        us, outside = self._by_tokens.at(shapes.padded)
        more, beyond = self._by_requests.at(shapes.requests)
        us, outside = us + more, outside | beyond
        for part in self._by_batch:
            predicted, beyond = self._predictor.predict(part.signature, batches)
            us[self.groups.index(part.group)] += part.count * predicted
            outside = outside | beyond
        return us, outside

    def _table(self, parts: Iterable[Part], kinds: tuple[str, ...], as_batches: Callable) -> _Table:
        chosen = [part for part in parts if part.kind in kinds]

        def fill(numbers: Integers) -> tuple[Numbers, Flags]:
            us = np.zeros((len(self.groups), len(numbers)))
            outside = np.zeros(len(numbers), bool)
            for part in chosen:
                predicted, beyond = self._predictor.predict(part.signature, as_batches(numbers))
                us[self.groups.index(part.group)] += part.count * predicted
                outside |= beyond
            return us, outside

        return _Table(len(self.groups), fill)


class _Table:
    """Times by group at whole numbers, worked out when one is first asked for."""

    def __init__(self, groups: int, fill: Callable[[Integers], tuple[Numbers, Flags]]) -> None:
        self._fill = fill
        self._us = np.full((groups, 1), np.nan)
        self._outside = np.zeros(1, bool)
        self._known = np.zeros(1, bool)

    def at(self, numbers: Integers) -> tuple[Numbers, Flags]:
        """Microseconds by (group, number), and which numbers are extrapolated."""
        most = int(numbers.max())
        if most >= len(self._known):
            self._grow(most + 1)
        missing = numbers[~self._known[numbers]]
        if len(missing):
            missing = np.unique(missing)
            self._us[:, missing], self._outside[missing] = self._fill(missing)
            self._known[missing] = True
        return self._us[:, numbers], self._outside[numbers]

    def _grow(self, size: int) -> None:
        more = max(size, 2 * len(self._known)) - len(self._known)
        self._us = np.pad(self._us, ((0, 0), (0, more)), constant_values=np.nan)
        self._outside = np.pad(self._outside, (0, more))
        self._known = np.pad(self._known, (0, more))


def _of_tokens(numbers: Integers) -> Batches:
    """One prefill of so many tokens each."""
    return Batches(numbers, np.zeros_like(numbers), np.arange(len(numbers)))


def _of_requests(numbers: Integers) -> Batches:
    """So many decodes each."""
    ones = np.ones(int(numbers.sum()), np.int64)
    return Batches(ones, ones, np.cumsum(numbers) - numbers)
