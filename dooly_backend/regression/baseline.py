"""One signature's times: straight lines through its measured points.

This is the honest baseline that learned regressors have to beat.

Attention depends on the whole batch, of which only a grid is measured: single
prefills over (chunk, history) and equal decodes over (batch size, context).
Any other batch is approximated: a prefill by the grid, several prefills by
the sum of each, decodes by as many at their mean context, and prefills with
decodes by the sum of both.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence

from dooly_backend.database.records import Measurement, Signature
from dooly_backend.errors import InputError
from dooly_backend.regression.features import expected_experts
from dooly_backend.regression.interpolate import Curve, Estimate, Statistics, Surface
from dooly_backend.workload import Batch, WorkloadPoint


class SignatureLatency(ABC):
    """Predicts how long one call of a signature takes. `points` is where it was measured."""

    points: tuple[WorkloadPoint, ...] = ()

    @abstractmethod
    def at(self, batch: Batch) -> tuple[Estimate, bool]:
        """The statistics for `batch`, and whether exactly this was measured.

        Raises InputError when nothing of the kind was measured.
        """


class ConstantLatency(SignatureLatency):
    """Depends on nothing."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self.points = _points(measurements)
        self._estimate = Estimate(statistics_of(measurements[0]), extrapolated=False)

    def at(self, batch: Batch) -> tuple[Estimate, bool]:
        return self._estimate, True


class TokensLatency(SignatureLatency):
    """Depends on the number of new tokens in the step."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self.points = _points(measurements)
        self._measured = {_number(m.point.num_tokens): statistics_of(m) for m in measurements}
        self._curve = Curve(self._measured)

    def at(self, batch: Batch) -> tuple[Estimate, bool]:
        return self._curve.at(batch.num_tokens), batch.num_tokens in self._measured


class RequestsLatency(SignatureLatency):
    """Depends on the number of requests in the step."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self.points = _points(measurements)
        self._measured = {_number(m.point.num_reqs): statistics_of(m) for m in measurements}
        self._curve = Curve(self._measured)

    def at(self, batch: Batch) -> tuple[Estimate, bool]:
        return self._curve.at(batch.num_reqs), batch.num_reqs in self._measured


class RoutingLatency(SignatureLatency):
    """Depends on the tokens and on the distinct experts that they activate: MoE layers.

    A batch alone does not tell the experts: `at` takes the number expected
    when every token draws its experts at random.
    """

    def __init__(self, signature: Signature, measurements: Sequence[Measurement]) -> None:
        routing = json.loads(signature.canonical)["routing"]
        self._experts, self._top_k = int(routing["experts"]), int(routing["top_k"])
        self.points = _points(measurements)
        self._measured = {
            (_number(m.point.num_tokens), _number(m.point.num_experts)): statistics_of(m)
            for m in measurements
        }
        self._surface = Surface(self._measured)

    def at(self, batch: Batch) -> tuple[Estimate, bool]:
        experts = expected_experts(batch.num_tokens, self._experts, self._top_k)
        return self.at_routing(batch.num_tokens, experts)

    def at_routing(self, num_tokens: int, num_experts: float) -> tuple[Estimate, bool]:
        """The statistics where `num_experts` distinct experts fire for `num_tokens` tokens."""
        measured = (float(num_tokens), float(num_experts)) in self._measured
        return self._surface.at(num_tokens, num_experts), measured


class BatchLatency(SignatureLatency):
    """Depends on every request's lengths: attention."""

    def __init__(self, name: str, measurements: Sequence[Measurement]) -> None:
        self._name = name
        self.points = _points(measurements)
        self._measured: dict[str, Statistics] = {}
        prefills: dict[tuple[float, float], Statistics] = {}
        decodes: dict[tuple[float, float], Statistics] = {}
        for measurement in measurements:
            batch, values = measurement.point.batch, statistics_of(measurement)
            assert batch is not None
            self._measured[batch.key] = values
            if len(set(batch.requests)) > 1:
                continue  # not on the grid: answers for itself only
            request = batch.requests[0]
            if request.is_decode:
                decodes[batch.num_reqs, request.context] = values
            elif batch.num_reqs == 1:
                prefills[request.query, request.context] = values
        self._prefills = Surface(prefills) if prefills else None
        self._decodes = Surface(decodes) if decodes else None

    def at(self, batch: Batch) -> tuple[Estimate, bool]:
        measured = self._measured.get(batch.key)
        if measured is not None:
            return Estimate(measured, extrapolated=False), True
        parts: list[Estimate] = []
        for request, count in Counter(batch.prefills).items():
            surface = self._known(self._prefills, "prefills")
            parts += [surface.at(request.query, request.context)] * count
        if batch.decodes:
            surface = self._known(self._decodes, "decodes")
            context = sum(request.context for request in batch.decodes) / len(batch.decodes)
            parts.append(surface.at(len(batch.decodes), context))
        return total(parts), False

    def _known(self, surface: Surface | None, what: str) -> Surface:
        if surface is None:
            raise InputError(
                f"{self._name} has no measured {what}: run `dooly profile` again, "
                "it continues where it stopped"
            )
        return surface


def signature_latency(
    signature: Signature, measurements: Sequence[Measurement]
) -> SignatureLatency:
    """The baseline for a signature of this kind. `measurements` must not be empty."""
    if signature.kind == "tokens":
        return TokensLatency(measurements)
    if signature.kind == "requests":
        return RequestsLatency(measurements)
    if signature.kind == "routing":
        return RoutingLatency(signature, measurements)
    if signature.kind == "batch":
        return BatchLatency(signature.name, measurements)
    return ConstantLatency(measurements)


def statistics_of(measurement: Measurement) -> Statistics:
    return Statistics(
        measurement.min_us,
        measurement.mean_us,
        measurement.median_us,
        measurement.max_us,
        measurement.std_us,
    )


def total(parts: Iterable[Estimate]) -> Estimate:
    """One after the other: times add, independent spreads by their squares."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    *times, spreads = zip(*(part.statistics for part in parts), strict=True)
    values = Statistics._make([*map(math.fsum, times), math.hypot(*spreads)])
    return Estimate(values, any(part.extrapolated for part in parts))


def _points(measurements: Sequence[Measurement]) -> tuple[WorkloadPoint, ...]:
    return tuple(measurement.point for measurement in measurements)


def _number(value: int | None) -> float:
    assert value is not None  # the point's kind says so, and so does the schema
    return float(value)
