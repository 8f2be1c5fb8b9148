"""What differs between two environments' times: `dooly db diff`.

Both are databases' raw samples of the same points. A point *moved* when its
samples differ significantly (Mann-Whitney rank-sum test, two-sided, of which
the p-values of all points together are corrected by Benjamini and Hochberg)
and its median by more than a threshold, since with enough samples every two
sessions differ significantly. A signature moved when one of its points did, or
when all of its points together did (Wilcoxon signed-rank test of the ratios of
their medians, corrected likewise): a few samples a point can show the second
and never the first.

A kernel that an upgrade changed makes another signature. Signatures that only
one environment has are paired where the same configuration runs them at the
same place, and compared as if they were one.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dooly_backend.database.records import Environment, Measurement, Occurrence, Signature
from dooly_backend.database.store import Database
from dooly_backend.errors import InputError

#: Fewest points of which the signed-rank test can be significant at 5%.
_FEWEST_POINTS = 6
_DIGEST_SHORTEST = 6  # hex digits that select by digest

Verdict = Literal["slower", "faster", "mixed", "undecided", "unchanged"]


@dataclass(frozen=True)
class Place:
    """One side of a comparison: an environment of an open database."""

    database: Database
    environment_id: int

    @property
    def environment(self) -> Environment:
        return self.database.environments()[self.environment_id]


@dataclass(frozen=True)
class PointChange:
    """One point on both sides: medians in microseconds, and the corrected p-value."""

    point: str
    old_us: float
    new_us: float
    p: float
    moved: bool

    @property
    def ratio(self) -> float:
        return _ratio(self.old_us, self.new_us)


@dataclass(frozen=True)
class SignatureChange:
    """A signature on both sides; `new` is another one where its kernels changed.

    `ratio` is the geometric mean of new over old medians, `p` the corrected
    p-value of all points together (1 where they are too few to tell).
    """

    name: str
    old: str
    new: str
    paths: tuple[str, ...]
    ratio: float
    p: float
    verdict: Verdict
    points: tuple[PointChange, ...]

    @property
    def moved(self) -> bool:
        return self.verdict in ("slower", "faster", "mixed")


@dataclass(frozen=True)
class DiffResult:
    """Everything that both sides measured, and what only one of them has."""

    old: Environment
    new: Environment
    threshold: float
    changes: tuple[SignatureChange, ...]
    only_old: tuple[Signature, ...]
    only_new: tuple[Signature, ...]
    lost_points: Mapping[str, tuple[str, ...]]  # measured before, skipped now; by signature

    @property
    def moved(self) -> tuple[SignatureChange, ...]:
        return tuple(change for change in self.changes if change.moved)


def choose(database: Database, text: str | None) -> int:
    """Row id of the one environment that `text` names, or that there is.

    By digest or by a part of "DEVICE, ENGINE VERSION". Raises InputError, naming
    the choices, when none or several fit.
    """
    stored = database.environments()
    fitting = [i for i, environment in stored.items() if text is None or _fits(environment, text)]
    if len(fitting) == 1:
        return fitting[0]
    choices = "; ".join(map(described, stored.values())) or "none"
    what = f"{len(fitting) or 'no'} environments" + (f" that fit {text!r}" if text else "")
    raise InputError(
        f"database {database.path} has {what}, of {choices}: "
        "choose one with --from or --to: its digest, or a part of its device, engine or version"
    )


def choose_two(database: Database, old: str | None, new: str | None) -> tuple[int, int]:
    """Two environments of one database: those named, else the only two, the older one first."""
    stored = sorted(database.environments())
    if old is None and new is None and len(stored) == 2:
        return stored[0], stored[1]
    if old is not None and new is None and len(stored) == 2:
        named = choose(database, old)
        return named, next(i for i in stored if i != named)
    chosen = choose(database, old), choose(database, new)
    if chosen[0] == chosen[1]:
        raise InputError("--from and --to name the same environment: there is nothing to compare")
    return chosen


def described(environment: Environment) -> str:
    """``NVIDIA H200, vllm 0.25.1 (0123456789ab)``."""
    return f"{_label(environment)} ({environment.digest[:12]})"


def _label(environment: Environment) -> str:
    return f"{environment.device}, {environment.engine} {environment.engine_version}"


def _fits(environment: Environment, text: str) -> bool:
    wanted = text.casefold()
    by_digest = len(wanted) >= _DIGEST_SHORTEST and environment.digest.startswith(wanted)
    return by_digest or wanted in _label(environment).casefold()


def diff(old: Place, new: Place, threshold: float = 0.05, alpha: float = 0.05) -> DiffResult:
    """Compare what both sides measured.

    `threshold` is the smallest relative change that matters, `alpha` the false
    discovery rate. Raises DatabaseError.
    """
    before, after = _measured(old), _measured(new)
    paths, pairs = _pairs(old, new, before, after)
    compared = [(pair, _common(before[pair[0].hash][1], after[pair[1].hash][1])) for pair in pairs]
    compared = [(pair, points) for pair, points in compared if points]
    point_ps = iter(
        _corrected([_rank_sum(a, b) for _, points in compared for a, b in points.values()])
    )
    signature_ps = _corrected([_signed_rank(points.values()) for _, points in compared])
    changes = []
    for (pair, points), p in zip(compared, signature_ps, strict=True):
        found = tuple(
            _point_change(key, a, b, next(point_ps), threshold, alpha)
            for key, (a, b) in points.items()
        )
        changes.append(_change(pair, paths, found, p, threshold, alpha))
    changes.sort(
        key=lambda change: (not change.moved, -abs(math.log(change.ratio or 1)), change.name)
    )
    seen = {hash_ for pair in pairs for hash_ in (pair[0].hash, pair[1].hash)}
    return DiffResult(
        old.environment,
        new.environment,
        threshold,
        tuple(changes),
        tuple(signature for hash_, (signature, _) in before.items() if hash_ not in seen),
        tuple(signature for hash_, (signature, _) in after.items() if hash_ not in seen),
        _lost(new, pairs, before),
    )


def compare(
    pairs: Mapping[Any, tuple[Measurement, Measurement]], threshold: float, alpha: float = 0.05
) -> dict[Any, PointChange]:
    """Each pair of an older and a newer measurement of one point, by the caller's key."""
    ps = _corrected([_rank_sum(old, new) for old, new in pairs.values()])
    return {
        key: _point_change(old.point.key, old, new, p, threshold, alpha)
        for (key, (old, new)), p in zip(pairs.items(), ps, strict=True)
    }


# -- what is compared with what --------------------------------------------------

Measured = dict[str, tuple[Signature, dict[str, Measurement]]]  # by hash, then by point
Pair = tuple[Signature, Signature]


def _measured(place: Place) -> Measured:
    found: Measured = {}
    for hash_, signature in place.database.signatures().items():
        measurements = place.database.measurements(hash_, place.environment_id)
        if measurements:
            found[hash_] = signature, {m.point.key: m for m in measurements}
    return found


def _pairs(
    old: Place, new: Place, before: Measured, after: Measured
) -> tuple[dict[str, tuple[str, ...]], list[Pair]]:
    """Paths by hash, and the pairs: equal signatures, then those that stand in one place."""
    graphs = [_graphs(place) for place in (old, new)]
    paths: dict[str, list[str]] = {}
    for graph in graphs:
        for (_, path, _), occurrence in graph.items():
            known = paths.setdefault(occurrence.signature.hash, [])
            if path not in known:
                known.append(path)
    pairs = [(before[h][0], after[h][0]) for h in before if h in after]
    replaced: dict[str, Counter[str]] = {}
    for place, was in graphs[0].items():
        now = graphs[1].get(place)
        if now is None or was.signature.kind != now.signature.kind:
            continue
        one, other = was.signature.hash, now.signature.hash
        if one in before and one not in after and other in after and other not in before:
            replaced.setdefault(one, Counter())[other] += 1
    pairs += [(before[h][0], after[c.most_common(1)[0][0]][0]) for h, c in replaced.items()]
    return {hash_: tuple(found) for hash_, found in paths.items()}, pairs


def _graphs(place: Place) -> dict[tuple[str, str, int], Occurrence]:
    """Occurrences by configuration, path, and how many came before in that path."""
    found: dict[tuple[str, str, int], Occurrence] = {}
    for id_, configuration in place.database.configurations().items():
        counts: Counter[str] = Counter()
        for occurrence in place.database.occurrences(id_, place.environment_id):
            found[configuration.digest, occurrence.path, counts[occurrence.path]] = occurrence
            counts[occurrence.path] += 1
    return found


def _common(
    before: Mapping[str, Measurement], after: Mapping[str, Measurement]
) -> dict[str, tuple[Measurement, Measurement]]:
    return {key: (before[key], after[key]) for key in before if key in after}


def _lost(new: Place, pairs: Iterable[Pair], before: Measured) -> dict[str, tuple[str, ...]]:
    lost = {}
    for was, now in pairs:
        skipped = {s.point.key for s in new.database.skipped(now.hash, new.environment_id)}
        keys = tuple(key for key in before[was.hash][1] if key in skipped)
        if keys:
            lost[now.hash] = keys
    return lost


# -- statistics ------------------------------------------------------------------


def _rank_sum(old: Measurement, new: Measurement) -> float:
    """The p-value of both having come from one distribution."""
    from scipy.stats import mannwhitneyu

    with warnings.catch_warnings():
        # Of samples that are all equal scipy says that there is nothing to rank: p is nan.
        warnings.simplefilter("ignore", RuntimeWarning)
        p = float(mannwhitneyu(old.samples_us, new.samples_us).pvalue)
    return 1.0 if math.isnan(p) else p


def _signed_rank(points: Iterable[tuple[Measurement, Measurement]]) -> float:
    """The p-value of medians having moved up as much as down; 1 for too few points."""
    from scipy.stats import wilcoxon

    ratios = [math.log(_ratio(a.median_us, b.median_us) or 1) for a, b in points]
    if len(ratios) < _FEWEST_POINTS or not any(ratios):
        return 1.0
    return float(wilcoxon(ratios).pvalue)


def _corrected(ps: Sequence[float]) -> list[float]:
    """p-values by Benjamini and Hochberg: below alpha, a share of alpha is false."""
    from scipy.stats import false_discovery_control

    return [float(p) for p in false_discovery_control(ps)] if ps else []


def _ratio(old_us: float, new_us: float) -> float:
    """New over old; 1 where both are 0, as CUDA events tell of an empty call."""
    if old_us == new_us:
        return 1.0
    return new_us / old_us if old_us else math.inf


def _matters(ratio: float, threshold: float) -> bool:
    return ratio > 1 + threshold or ratio < 1 / (1 + threshold)


def _point_change(
    key: str, old: Measurement, new: Measurement, p: float, threshold: float, alpha: float
) -> PointChange:
    ratio = _ratio(old.median_us, new.median_us)
    moved = p < alpha and _matters(ratio, threshold)
    return PointChange(key, old.median_us, new.median_us, p, moved)


def _change(
    pair: Pair,
    paths: Mapping[str, tuple[str, ...]],
    points: tuple[PointChange, ...],
    p: float,
    threshold: float,
    alpha: float,
) -> SignatureChange:
    ratios = [point.ratio for point in points if 0 < point.ratio < math.inf]
    ratio = statistics.geometric_mean(ratios) if ratios else 1.0
    directions = {point.ratio > 1 for point in points if point.moved}
    if p < alpha and _matters(ratio, threshold):
        directions.add(ratio > 1)
    verdict: Verdict = "unchanged"
    if directions:
        verdict = "mixed" if len(directions) > 1 else "slower" if directions.pop() else "faster"
    elif any(_matters(point.ratio, threshold) for point in points):
        verdict = "undecided"
    old, new = pair
    where = paths.get(new.hash) or paths.get(old.hash, ())
    return SignatureChange(new.name, old.hash, new.hash, where, ratio, p, verdict, points)
