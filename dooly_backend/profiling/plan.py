"""What a profile would measure, without measuring it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dooly_backend.config import AdaptiveSweep, Grid
from dooly_backend.database import Database
from dooly_backend.database.records import Configuration, Measurement, Occurrence, Signature
from dooly_backend.engines import Engine
from dooly_backend.operations.callgraph import occurrences, signatures
from dooly_backend.operations.runnable import resolve
from dooly_backend.profiling.adaptive import most_points, needs
from dooly_backend.profiling.collective_calls import (
    CollectiveCall,
    collective_calls,
    occurrences_of,
    points_of,
)
from dooly_backend.profiling.evidence import Evidence
from dooly_backend.profiling.measure import Regime
from dooly_backend.profiling.sweep import sweep_points
from dooly_backend.tracing.tracer import trace_model

#: Untimed work per sample beside the call: flushing the caches, restoring inputs. Measured
#: on the CPUs and GPUs at hand it is of this order; it only serves an estimate.
OVERHEAD_US = 8_000.0
#: Calls per sample: the sibling, the predecessor, the call itself.
CALLS_PER_SAMPLE = 3
UNKNOWN_CALL_US = 2_000.0


@dataclass(frozen=True)
class PlannedSignature:
    """A signature of the plan: what of it is known, and from which models."""

    signature: Signature
    paths: tuple[str, ...]
    count: int  # calls in one step of the full model
    missing: int  # points of the sweep that must be measured; of an adaptive one, at most
    points: int  # points of the sweep; of an adaptive one, at most
    known_from: tuple[str, ...]

    @property
    def is_known(self) -> bool:
        return self.missing == 0


@dataclass(frozen=True)
class Plan:
    """What `dooly profile` would do for one configuration."""

    configuration: Configuration
    signatures: tuple[PlannedSignature, ...]
    occurrences: int
    expected_seconds: float  # at most, where the points are
    at_most: bool = False  # an adaptive sweep ends earlier where predictions are good

    @property
    def known(self) -> int:
        return sum(planned.is_known for planned in self.signatures)

    @property
    def new(self) -> int:
        return len(self.signatures) - self.known

    @property
    def points(self) -> int:
        """Points that would be measured; of an adaptive sweep, at most."""
        return sum(planned.missing for planned in self.signatures)


class Known:
    """The points that a database has in an environment, and those that earlier plans add."""

    def __init__(self, database: Database | None) -> None:
        self._database = database
        self._planned: dict[tuple[str, str], set[str]] = {}
        self._models: dict[tuple[str, str], list[str]] = {}
        self._stored = self._stored_models(database)

    def points(self, signature: Signature, environment: str) -> set[str]:
        """Keys of the points of `signature` that need no measuring in `environment`."""
        planned = self._planned.get((signature.hash, environment), set())
        return planned | self._settled(signature, environment)

    def models(self, signature: Signature, environment: str) -> tuple[str, ...]:
        """The models that run `signature`: in the database, or earlier in the plan."""
        earlier = self._models.get((signature.hash, environment), [])
        stored = (
            self._stored.get(signature.hash, []) if self._settled(signature, environment) else []
        )
        return tuple(dict.fromkeys([*stored, *earlier]))

    def add(self, signature: Signature, environment: str, points: set[str], model: str) -> None:
        """`model`'s profile will have measured `points`."""
        key = signature.hash, environment
        self._planned.setdefault(key, set()).update(points)
        self._models.setdefault(key, []).append(model)

    def evidence(self, signature: Signature, engine: Engine) -> Evidence:
        """What is measured of `signature` in the engine's environment."""
        environment = engine.environment.digest
        return Evidence(
            signature,
            tuple(self._measurements(signature, environment, oldest_first=True)),
            frozenset(self._settled(signature, environment)),
            engine,
        )

    def call_us(self, signature: Signature, environment: str) -> float | None:
        """Typical time of a call of `signature` so far, None when nothing is known."""
        found = self._measurements(signature, environment)
        return statistics.fmean(m.median_us for m in found) if found else None

    def _environment_id(self, environment: str) -> int | None:
        if self._database is None:
            return None
        known = self._database.environments().items()
        return next((id_ for id_, value in known if value.digest == environment), None)

    def _settled(self, signature: Signature, environment: str) -> set[str]:
        id_ = self._environment_id(environment)
        if self._database is None or id_ is None:
            return set()
        return self._database.settled_points(signature.hash, id_)

    def _measurements(
        self, signature: Signature, environment: str, oldest_first: bool = False
    ) -> list[Measurement]:
        id_ = self._environment_id(environment)
        if self._database is None or id_ is None:
            return []
        return self._database.measurements(signature.hash, id_, oldest_first=oldest_first)

    @staticmethod
    def _stored_models(database: Database | None) -> Mapping[str, list[str]]:
        models: dict[str, list[str]] = {}
        if database is not None:
            for id_, configuration in database.configurations().items():
                for occurrence in database.occurrences(id_):
                    names = models.setdefault(occurrence.signature.hash, [])
                    if configuration.model not in names:
                        names.append(configuration.model)
        return models


def plan(
    engine: Engine,
    known: Known,
    sweep: Grid | AdaptiveSweep,
    regime: Regime | None = None,
) -> Plan:
    """Trace the engine's model and compare what it needs with what is `known`."""
    trace = trace_model(engine)
    signed = signatures(trace, resolve(trace, engine), engine)
    return plan_of(
        engine, occurrences(engine, signed), collective_calls(trace, engine), known, sweep, regime
    )


def plan_of(
    engine: Engine,
    graph: Sequence[Occurrence],
    calls: Sequence[CollectiveCall],
    known: Known,
    sweep: Grid | AdaptiveSweep,
    regime: Regime | None = None,
) -> Plan:
    """The plan for a call graph and its collectives, each of which is a signature, too.

    What it would measure is added to `known`, so that plans of several models
    count as if they were profiled one after the other.
    """
    environment = engine.environment.digest
    graph = [*graph, *occurrences_of(calls, len(graph))]
    collectives = {call.collective.signature: call.collective for call in calls}
    planned = []
    seconds = 0.0
    regime = regime or Regime()
    for signature, places in _by_signature(graph).items():
        if signature in collectives:
            wanted = {point.key for point in points_of(collectives[signature], sweep, engine)}
            missing = wanted - known.points(signature, environment)
        else:
            wanted, missing = _points(signature, sweep, engine, known)
        planned.append(
            PlannedSignature(
                signature,
                tuple(dict.fromkeys(place.path for place in places)),
                sum(place.count for place in places),
                len(missing),
                len(wanted),
                known.models(signature, environment),
            )
        )
        seconds += len(missing) * point_seconds(known.call_us(signature, environment), regime)
        known.add(signature, environment, wanted, engine.configuration.model)
    return Plan(
        engine.configuration,
        tuple(planned),
        sum(occurrence.count for occurrence in graph),
        seconds,
        at_most=isinstance(sweep, AdaptiveSweep),
    )


def _points(
    signature: Signature, sweep: Grid | AdaptiveSweep, engine: Engine, known: Known
) -> tuple[set[str], set[str]]:
    """Keys of all points of `sweep`, and of those that are missing.

    Where an adaptive sweep will place its points nobody knows before it has
    begun: they are numbered, by the range that they lie in.
    """
    planned = known.points(signature, engine.environment.digest)
    if not isinstance(sweep, AdaptiveSweep):
        wanted = {point.key for point, _ in sweep_points(signature, sweep, engine)}
        return wanted, wanted - planned
    limits = (engine.max_num_tokens, engine.max_num_reqs, engine.max_request_len)
    wanted = {f"{limits} {n}" for n in range(most_points(signature, sweep, engine))}
    missing = sum(need.at_most for need in needs(known.evidence(signature, engine), sweep))
    return wanted, set(sorted(wanted)[:missing]) - planned


def point_seconds(call_us: float | None, regime: Regime) -> float:
    """Expected time to measure one point of a call that takes `call_us`, None for unknown."""
    call_us = UNKNOWN_CALL_US if call_us is None else call_us
    samples = regime.samples(call_us) + regime.warmups
    return samples * (CALLS_PER_SAMPLE * call_us + OVERHEAD_US) / 1e6


def _by_signature(graph: Sequence[Occurrence]) -> dict[Signature, list[Occurrence]]:
    found: dict[Signature, list[Occurrence]] = {}
    for occurrence in graph:
        found.setdefault(occurrence.signature, []).append(occurrence)
    return found
