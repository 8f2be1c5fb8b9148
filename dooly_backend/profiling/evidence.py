"""What is known of a signature while it is measured, and what that predicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from dooly_backend.database.records import Measurement, Signature
from dooly_backend.engines import Engine
from dooly_backend.errors import InputError
from dooly_backend.profiling.families import all_planes
from dooly_backend.profiling.sweep import batch_of
from dooly_backend.regression.baseline import (
    RoutingLatency,
    SignatureLatency,
    signature_latency,
)
from dooly_backend.workload import WorkloadPoint

Fit = Callable[[Signature, Sequence[Measurement]], SignatureLatency]

#: Errors of shorter calls are taken relative to this: they decide nothing, timers blur them.
SHORTEST_US = 5.0


@dataclass(frozen=True)
class Evidence:
    """What is known of a signature: measurements, oldest first, and the settled points' keys."""

    signature: Signature
    measurements: tuple[Measurement, ...]
    settled: frozenset[str]
    engine: Engine
    fit: Fit = signature_latency

    def error(self, index: int, without: frozenset[str] = frozenset()) -> float | None:
        """Relative error of the measurement at `index` as predicted from those before it.

        Only what exceeds the uncertainty of the median counts: within it more
        points tell nothing. None where no prediction is possible.
        """
        measured = self.measurements[index]
        predicted = self._predicted(self.measurements[:index], measured.point, without)
        if predicted is None:
            return None
        beyond = max(0.0, abs(predicted - measured.median_us) - _noise_us(measured))
        return beyond / max(measured.median_us, SHORTEST_US)

    def from_the_others(self, index: int) -> float | None:
        """The time that all others predict for the measurement at `index`, microseconds.

        None for a point at the edge of what is measured, which they do not enclose.
        """
        point = self.measurements[index].point
        others = [m.point for m in self.measurements if m.point != point]
        for plane in all_planes(self.signature, self.engine.max_request_len):
            if plane.owns(point) and not plane.encloses(others, point):
                return None
        return self._predicted(self.measurements, point, frozenset([point.key]))

    def now(self, point: WorkloadPoint) -> float | None:
        """The time that is predicted at `point`, microseconds; None where nothing allows it."""
        return self._predicted(self.measurements, point)

    def _predicted(
        self,
        measurements: Sequence[Measurement],
        point: WorkloadPoint,
        without: frozenset[str] = frozenset(),
    ) -> float | None:
        latency = self._fitted(len(measurements), without)
        if latency is None:
            return None
        try:
            if isinstance(latency, RoutingLatency) and point.num_tokens and point.num_experts:
                estimate, _ = latency.at_routing(point.num_tokens, point.num_experts)
            else:
                estimate, _ = latency.at(batch_of(point, self.engine))
        except InputError:  # nothing of this kind is measured yet
            return None
        return estimate.statistics.median_us

    def _fitted(self, count: int, without: frozenset[str]) -> SignatureLatency | None:
        """The predictor from the first `count` measurements but those `without`."""
        key = count, without
        if key not in self._fits:
            used = [m for m in self.measurements[:count] if m.point.key not in without]
            self._fits[key] = self.fit(self.signature, used) if used else None
        return self._fits[key]

    @cached_property
    def _fits(self) -> dict[tuple[int, frozenset[str]], SignatureLatency | None]:
        return {}


def _noise_us(measurement: Measurement) -> float:
    """Two standard errors of the median, from the distance between the samples' quartiles.

    Of a normal distribution that distance is 1.35 standard deviations, and the
    median's standard error 1.25 of them over the root of the number of samples.
    """
    count = len(measurement.samples_us)
    if count < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(measurement.samples_us, n=4, method="inclusive")
    return 2 * 1.25 * (upper - lower) / 1.35 / math.sqrt(count)
