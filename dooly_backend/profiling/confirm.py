"""After an upgrade: confirm what was measured before on a few points, and take over the rest.

A signature names what selects its kernels. One that an older environment of the
same device has under the same hash runs the same kernels, and is likely to take
as long. Its points of smallest, median and largest time are measured here (for
attention, of prefills and of decodes each), and where none of them moved beyond
the tolerance (as `dooly db diff` tells, on raw samples) nor all of them together, the
older environment's other points are taken over, marked with where they are
from. Where one did, nothing is taken over, and the sweep measures all of it.

Two sessions on one host differ, by 1% on a GPU and by 5 to 10% on a shared CPU.
By how much shows in the points themselves, as the scatter of their ratios about
those of their signatures; what lies within two standard errors of it beyond the
tolerance is no change: measured anew in full it would scatter as much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dooly_backend.database import Database
from dooly_backend.database.diff import choose, compare, described
from dooly_backend.database.inherit import inherit
from dooly_backend.database.records import Measurement, Signature
from dooly_backend.engines import Engine
from dooly_backend.errors import InputError
from dooly_backend.profiling.measure import WorkloadPointKey
from dooly_backend.profiling.rounds import Work
from dooly_backend.profiling.sweep import batch_of, fits
from dooly_backend.workload import Batch

#: Relative change of a median that is taken for noise between two sessions.
TOLERANCE = 0.05

#: No timer tells shorter times from nothing.
_LEAST_US = 0.1

#: Standard deviations of a normal distribution in its median absolute deviation.
_SIGMAS_OF_MEDIAN = 1.4826


@dataclass(frozen=True)
class Confirmation:
    """What a few points said of the signatures of an older environment."""

    source: str  # the older environment, described
    confirmed: tuple[Signature, ...]
    changed: tuple[Signature, ...]
    points: int  # taken over
    scatter: float = 0.0  # of single points between the two sessions, relative, one sigma


def source_of(engine: Engine, database: Database, text: str) -> int:
    """Row id of the environment that `text` names. Raises InputError for another device."""
    id_ = choose(database, text)
    source, own = database.environments()[id_], engine.environment
    if source.digest == own.digest:
        raise InputError(f"{described(source)} is this environment: confirm from an older one")
    if source.device != own.device:
        raise InputError(f"{described(source)} is another device than {own.device}: profile here")
    return id_


def confirm(
    engine: Engine,
    database: Database,
    source: int,
    environment_id: int,
    wanted: Iterable[Signature],
    measure: Callable[[Work], None],
    tolerance: float = TOLERANCE,
) -> Confirmation:
    """Take over from environment `source` what a few points confirm.

    `measure` settles the work that it is given in this environment. What is
    settled here already stays; points that do not fit the engine are left out.
    """
    old = {
        signature: _fitting(engine, database.measurements(signature.hash, source))
        for signature in wanted
    }
    open_ = {
        signature: measurements
        for signature, measurements in old.items()
        if any(
            m.point.key not in database.settled_points(signature.hash, environment_id)
            for m in measurements
        )
    }
    measure(_work(engine, database, environment_id, open_))
    pairs = {
        (signature.hash, key): (before, after)
        for signature, measurements in open_.items()
        for key, before, after in _common(database, environment_id, signature, measurements)
    }
    ratios: dict[str, list[float]] = {}
    for (hash_, _), (before, after) in pairs.items():
        ratios.setdefault(hash_, []).append(_log_ratio(before, after))
    noise = scatter(ratios.values())
    moved: dict[str, bool] = {}
    for (hash_, _), change in compare(pairs, _widened(tolerance, noise)).items():
        moved[hash_] = moved.get(hash_, False) or change.moved
    confirmed, changed, points = [], [], 0
    for signature, measurements in open_.items():
        known = ratios.get(signature.hash)
        if known is None:  # none of its points could be measured here
            continue
        drift = math.expm1(abs(statistics.fmean(known)))
        if moved[signature.hash] or drift > _widened(tolerance, noise / math.sqrt(len(known))):
            changed.append(signature)
            continue
        confirmed.append(signature)
        keys = [m.point.key for m in measurements]
        points += inherit(database, signature, source, environment_id, keys)
    return Confirmation(
        described(database.environments()[source]),
        tuple(confirmed),
        tuple(changed),
        points,
        noise,
    )


def scatter(ratios: Iterable[Sequence[float]]) -> float:
    """Standard deviation of logarithms of ratios about the mean of their signature's.

    From the median of the absolute residuals, which a change at a few points does not
    move; 0 where no signature has two points.
    """
    groups = [group for group in ratios if len(group) > 1]
    residuals = [abs(value - statistics.fmean(group)) for group in groups for value in group]
    if not residuals:
        return 0.0
    freedom = len(residuals) - len(groups)  # the means are fitted
    return _SIGMAS_OF_MEDIAN * statistics.median(residuals) * math.sqrt(len(residuals) / freedom)


def _log_ratio(before: Measurement, after: Measurement) -> float:
    return math.log(max(after.median_us, _LEAST_US) / max(before.median_us, _LEAST_US))


def _widened(tolerance: float, noise: float) -> float:
    """The tolerance, relative, with two standard errors of a logarithm on top."""
    return math.expm1(math.log1p(tolerance) + 2 * noise)


def _fitting(engine: Engine, measurements: Sequence[Measurement]) -> list[Measurement]:
    return [m for m in measurements if fits(batch_of(m.point, engine), engine)]


def _work(
    engine: Engine,
    database: Database,
    environment_id: int,
    old: dict[Signature, list[Measurement]],
) -> Work:
    """The few points of every signature that are not settled here yet."""
    by_batch: dict[Batch, list[WorkloadPointKey]] = {}
    for signature, measurements in old.items():
        settled = database.settled_points(signature.hash, environment_id)
        for chosen in few(measurements):
            if chosen.point.key not in settled:
                batch = batch_of(chosen.point, engine)
                by_batch.setdefault(batch, []).append((signature.hash, chosen.point))
    return Work({batch: tuple(keys) for batch, keys in by_batch.items()})


def few(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The quickest, the middle one and the slowest; of attention those of each phase."""
    phases: dict[bool, list[Measurement]] = {}
    for measurement in measurements:
        batch = measurement.point.batch
        phases.setdefault(bool(batch and batch.prefills), []).append(measurement)
    chosen: list[Measurement] = []
    for of_phase in phases.values():
        ordered = sorted(of_phase, key=lambda m: (m.median_us, m.point.key))
        indices = sorted({0, len(ordered) // 2, len(ordered) - 1})
        chosen += [ordered[index] for index in indices]
    return chosen


def _common(
    database: Database,
    environment_id: int,
    signature: Signature,
    old: Sequence[Measurement],
) -> list[tuple[str, Measurement, Measurement]]:
    new = {m.point.key: m for m in database.measurements(signature.hash, environment_id)}
    return [(m.point.key, m, new[m.point.key]) for m in old if m.point.key in new]
