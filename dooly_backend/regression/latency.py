"""The time of an engine's step, from what a database measured.

with Database.open("latency.db", read_only=True) as database:
    model = LatencyModel.load(database, "Qwen/Qwen3-0.6B")
model.step_us(Batch.parse("2x128+0,8x1+1024"))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dooly_backend.database import Database
from dooly_backend.database.records import (
    Configuration,
    Environment,
    KvCapacity,
    Occurrence,
    PartCost,
    Signature,
    StepCost,
)
from dooly_backend.regression.baseline import SignatureLatency, signature_latency
from dooly_backend.regression.select import select
from dooly_backend.regression.whole_steps import OVER_TOKENS, StepRules, is_whole
from dooly_backend.workload import Batch


@dataclass(frozen=True)
class Latency:
    """The time of one call of an operation or module, in microseconds."""

    min_us: float
    mean_us: float
    median_us: float
    max_us: float
    std_us: float
    measured: bool  # exactly this was measured
    extrapolated: bool  # it lies outside the profiled range


@dataclass(frozen=True)
class LatencyModel:
    """Times of one configuration in one environment, at any batch."""

    configuration: Configuration
    environment: Environment
    occurrences: tuple[Occurrence, ...]
    step_cost: StepCost | None
    signatures: Mapping[str, SignatureLatency] = field(repr=False)  # by hash
    measured_at: str | None = None  # of the last measurement: UTC, ISO 8601
    kv_capacity: KvCapacity | None = None  # how many KV blocks there are; None: not profiled
    stream_cost: tuple[PartCost, ...] = ()  # fitted to whole steps of an engine at its defaults

    @classmethod
    def load(
        cls,
        database: Database,
        model: str | None = None,
        environment: str | None = None,
        **filters: Any,
    ) -> LatencyModel:
        """Everything that is needed of `database`, which may be closed afterwards.

        `model` is a name, its last part, or a configuration's digest;
        `environment` a device, a part of its name, or a digest; `filters` are
        fields of `Configuration` (tensor_parallel=2; None: any). Each may be
        left out when only one fits. Raises InputError, naming the choices,
        when none or several fit or measurements are missing.
        """
        configuration_id, environment_id = select(database, model, environment, filters)
        occurrences = tuple(database.occurrences(configuration_id, environment_id))
        signatures = {
            signature.hash: signature_latency(
                signature, database.measurements(signature.hash, environment_id)
            )
            for signature in {occurrence.signature for occurrence in occurrences}
        }
        return cls(
            database.configurations()[configuration_id],
            database.environments()[environment_id],
            occurrences,
            database.step_cost(configuration_id, environment_id),
            signatures,
            database.measured_at(configuration_id, environment_id),
            database.kv_capacity(configuration_id, environment_id),
            database.stream_cost(configuration_id, environment_id),
        )

    @cached_property
    def step_rules(self) -> StepRules:
        """How the engine runs steps. Raises InputError where its limits are not known."""
        return StepRules(
            self.configuration, self.step_cost, self.stream_cost, self.environment.engine_version
        )

    def occurrence(self, occurrence: Occurrence, batch: Batch) -> Latency:
        """One call of it. Raises InputError when nothing of the kind was measured."""
        estimate, measured = self.signatures[occurrence.signature.hash].at(batch)
        return Latency(*estimate.statistics, measured=measured, extrapolated=estimate.extrapolated)

    def operations_us(self, batch: Batch) -> float:
        """All operations of one step of the whole model: medians times counts."""
        return sum(
            count * self.signatures[signature].at(batch)[0].statistics.median_us
            for signature, (_, count) in self._counts.items()
        )

    def step_us(self, batch: Batch) -> float:
        """One of many equal steps of the whole model: its operations and the step's own cost.

        Where whole steps were measured it is padded, launched and fused as the engine does by
        default (`whole_steps.py`). Without anything fitted that part is missing from the result.
        """
        shape = self.step_rules.of_batch(batch)
        padded = Batch.prefill(shape.tokens)
        operations_us = whole_us = 0.0
        for hash_, (signature, count) in self._counts.items():
            seen = padded if signature.kind in OVER_TOKENS else batch
            us = count * self.signatures[hash_].at(seen)[0].statistics.median_us
            operations_us += us
            whole_us += us if is_whole(signature) else 0.0
        return shape.time_us(operations_us, whole_us)

    @cached_property
    def _counts(self) -> dict[str, tuple[Signature, int]]:
        """Each signature by its hash, and how often one step runs it."""
        counts: Counter[str] = Counter()
        signatures = {}
        for occurrence in self.occurrences:
            counts[occurrence.signature.hash] += occurrence.count
            signatures[occurrence.signature.hash] = occurrence.signature
        return {hash_: (signatures[hash_], count) for hash_, count in counts.items()}
