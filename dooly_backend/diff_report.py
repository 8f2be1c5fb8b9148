"""How a comparison of two environments is told: lines for people, values for scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dooly_backend.database.diff import DiffResult, PointChange, SignatureChange, described


def lines(result: DiffResult) -> Iterator[str]:
    """What moved, point by point at the extremes, and what could not be compared."""
    yield f"from {described(result.old)}"
    yield f"to   {described(result.new)}"
    for change in result.changes:
        if change.verdict != "unchanged":
            yield _line(change)
    unchanged = sum(change.verdict == "unchanged" for change in result.changes)
    points = sum(len(change.points) for change in result.changes)
    yield (
        f"{len(result.changes)} signatures compared at {points} points: {len(result.moved)} moved, "
        f"{unchanged} did not move by {result.threshold:.0%} anywhere"
    )
    for name, only in (("old", result.only_old), ("new", result.only_new)):
        if only:
            names = sorted({signature.name for signature in only})
            yield f"only in the {name} environment: {len(only)} signatures ({', '.join(names)})"
    for hash_, keys in result.lost_points.items():
        yield f"measured before and skipped now: {hash_[:12]} at {', '.join(keys)}"


def _line(change: SignatureChange) -> str:
    extreme = max(change.points, key=lambda point: (point.moved, abs(_log(point))))
    moved = sum(point.moved for point in change.points)
    kernels = "" if change.old == change.new else f", kernels changed from {change.old[:12]}"
    verdict = "not significant" if change.verdict == "undecided" else change.verdict
    where = ", ".join(change.paths) or "nowhere"
    return (
        f"{verdict}: {change.name} {change.new[:12]} ({where}{kernels}); "
        f"{moved} of {len(change.points)} points moved, most at {extreme.point}: "
        f"{extreme.old_us:.4g} to {extreme.new_us:.4g} us (p {extreme.p:.2g}); "
        f"{change.ratio - 1:+.1%} on average"
    )


def _log(point: PointChange) -> float:
    return math.log(point.ratio) if point.ratio else -math.inf


def as_values(result: DiffResult) -> dict[str, Any]:
    """What `dooly db diff --json` prints."""
    return {
        "ok": not result.moved,
        "old": result.old.digest,
        "new": result.new.digest,
        "threshold": result.threshold,
        "compared": len(result.changes),
        "moved": len(result.moved),
        "signatures": [_values(change) for change in result.changes],
        "only_old": [signature.hash for signature in result.only_old],
        "only_new": [signature.hash for signature in result.only_new],
        "lost_points": {hash_: list(keys) for hash_, keys in result.lost_points.items()},
    }


def _values(change: SignatureChange) -> dict[str, Any]:
    return {
        "name": change.name,
        "old": change.old,
        "new": change.new,
        "paths": list(change.paths),
        "verdict": change.verdict,
        "ratio": change.ratio,
        "p": change.p,
        "points": [
            {"point": p.point, "old_us": p.old_us, "new_us": p.new_us, "p": p.p, "moved": p.moved}
            for p in change.points
        ],
    }
