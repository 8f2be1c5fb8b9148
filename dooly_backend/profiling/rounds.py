"""What to measure in the next round: of a grid everything at once, of an adaptive sweep little.

Capturing a step is what costs most, so one captured step serves every
signature that wants its batch, and the signatures of an adaptive sweep agree
on where to go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dooly_backend.config import AdaptiveSweep, Grid
from dooly_backend.database import Database
from dooly_backend.database.records import Measurement, Signature
from dooly_backend.engines import Engine
from dooly_backend.profiling.adaptive import needs
from dooly_backend.profiling.doubts import doubtful, surprising
from dooly_backend.profiling.evidence import Evidence
from dooly_backend.profiling.measure import WorkloadPointKey
from dooly_backend.profiling.sweep import batch_of, sweep_points
from dooly_backend.workload import Batch, WorkloadPoint

#: Places of one family that a round measures.
PLACES_A_ROUND = 2


@dataclass(frozen=True)
class Work:
    """Points that are missing in the database, by the batch that shows them."""

    by_batch: Mapping[Batch, tuple[WorkloadPointKey, ...]]

    @property
    def points(self) -> int:
        return sum(map(len, self.by_batch.values()))


def next_work(
    engine: Engine,
    database: Database,
    environment_id: int,
    wanted: Iterable[Signature],
    sweep: Grid | AdaptiveSweep,
) -> Work:
    """What `database` lacks for `sweep` in this environment, none when all is known.

    Of an adaptive sweep it is a round: its outcome decides about the next.
    """
    distinct = {signature.hash: signature for signature in wanted}.values()
    if not isinstance(sweep, AdaptiveSweep):
        return _missing(engine, database, environment_id, distinct, sweep)
    return _round(engine, database, environment_id, distinct, sweep)


def doubted_work(
    engine: Engine,
    database: Database,
    environment_id: int,
    signatures: Mapping[str, Signature],
    fresh: Collection[WorkloadPointKey],
    sweep: Grid | AdaptiveSweep,
) -> dict[Batch, dict[WorkloadPointKey, Measurement]]:
    """The `fresh` measurements that others contradict, by the batch that shows their points.

    Of a grid's many points only what less work contradicts is looked for.
    """
    by_signature: dict[str, set[WorkloadPoint]] = {}
    for hash_, point in fresh:
        by_signature.setdefault(hash_, set()).add(point)
    by_batch: dict[Batch, dict[WorkloadPointKey, Measurement]] = {}
    for hash_, points in by_signature.items():
        known = evidence(engine, database, environment_id, signatures[hash_])
        by_point = {m.point: m for m in known.measurements}
        doubted = doubtful(known.signature, known.measurements, points, engine.max_request_len)
        if isinstance(sweep, AdaptiveSweep):
            doubted += surprising(known, points)
        for point in dict.fromkeys(doubted):
            keys = by_batch.setdefault(batch_of(point, engine), {})
            keys[hash_, point] = by_point[point]
    return by_batch


def evidence(
    engine: Engine, database: Database, environment_id: int, signature: Signature
) -> Evidence:
    """What `database` knows of `signature` in this environment."""
    return Evidence(
        signature,
        tuple(database.measurements(signature.hash, environment_id, oldest_first=True)),
        frozenset(database.settled_points(signature.hash, environment_id)),
        engine,
    )


def _missing(
    engine: Engine,
    database: Database,
    environment_id: int,
    wanted: Iterable[Signature],
    sweep: Grid,
) -> Work:
    by_batch: dict[Batch, list[WorkloadPointKey]] = {}
    for signature in wanted:
        settled = database.settled_points(signature.hash, environment_id)
        for point, batch in sweep_points(signature, sweep, engine):
            if point.key not in settled:
                by_batch.setdefault(batch, []).append((signature.hash, point))
    return Work({batch: tuple(keys) for batch, keys in by_batch.items()})


@dataclass
class _Place:
    """Points that signatures of one family may measure together."""

    points: tuple[WorkloadPoint, ...]
    score: float = 0.0
    signatures: list[str] = field(default_factory=list)


def _round(
    engine: Engine,
    database: Database,
    environment_id: int,
    wanted: Iterable[Signature],
    sweep: AdaptiveSweep,
) -> Work:
    """Of every family the places that promise most to all signatures that need it."""
    places: dict[str, dict[tuple[str, ...], _Place]] = {}
    for signature in wanted:
        for need in needs(evidence(engine, database, environment_id, signature), sweep):
            for candidate in need.candidates:
                key = tuple(point.key for point in candidate.points)
                place = places.setdefault(need.family, {}).setdefault(key, _Place(candidate.points))
                place.score += candidate.score
                place.signatures.append(signature.hash)
    by_batch: dict[Batch, list[WorkloadPointKey]] = {}
    for family in places.values():
        for place in _best(list(family.values())):
            for point in place.points:
                keys = by_batch.setdefault(batch_of(point, engine), [])
                keys += [(signature, point) for signature in place.signatures]
    return Work({batch: tuple(dict.fromkeys(keys)) for batch, keys in by_batch.items()})


def _best(places: list[_Place]) -> list[_Place]:
    """Where a family starts, or the few places with the highest scores."""
    starting = [place for place in places if place.score == float("inf")]
    return starting or sorted(places, key=lambda place: -place.score)[:PLACES_A_ROUND]
