"""Two databases beside each other: another sweep, and a configuration profiled alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dooly_backend.profiling.planners import Item
from integration.corpus.summary import GROUPS
from integration.cost.account import Account


def sweeps(grid: Account, other: Account) -> list[dict[str, Any]]:
    """Points and seconds of both sweeps by group, over the signatures that both measured.

    A signature counts once, with all points that any configuration wanted of it.
    """
    of_grid, of_other = points(grid), points(other)
    common = {hash_ for hash_, _ in of_grid} & {hash_ for hash_, _ in of_other}
    rows = []
    for group in (*GROUPS, None):
        sides = [
            [i for i in side.values() if i.signature in common and group in (None, i.group)]
            for side in (of_grid, of_other)
        ]
        if not sides[0]:
            continue
        row: dict[str, Any] = {
            "group": group or "all",
            "signatures": len({item.signature for item in sides[0]}),
        }
        for account, items in zip((grid, other), sides, strict=True):
            row[f"{account.sweep}_points"] = len(items)
            row[f"{account.sweep}_seconds"] = round(sum(item.seconds for item in items), 2)
        saved = [1 - b / a for a, b in zip(_sums(sides[0]), _sums(sides[1]), strict=True)]
        row["points_saved"], row["seconds_saved"] = (round(100 * share, 1) for share in saved)
        rows.append(row)
    return rows


def points(account: Account) -> dict[tuple[str, str], Item]:
    """Every point that some configuration wanted, once."""
    return {item.key: item for profile in account.profiles for item in profile.workload.items}


def _sums(items: Iterable[Item]) -> tuple[float, float]:
    items = list(items)
    return len(items), sum(item.seconds for item in items)


def alone(whole: Account, fresh: Account) -> Iterator[dict[str, Any]]:
    """Configurations that were profiled into a database of their own, as a naive planner would.

    What `whole` accounts for each, from points that others measured, beside what it
    really took: a check of the accounting. Only what began with nothing known counts.
    """
    known = {profile.configuration.digest: profile for profile in whole.profiles}
    for profile in fresh.profiles:
        accounted = known.get(profile.configuration.digest)
        began_with_nothing = len(profile.own) == len(profile.workload.items)
        if accounted is None or not began_with_nothing or fresh.sweep != whole.sweep:
            continue
        told = _sums(accounted.workload.items)
        took = _sums(profile.own)
        yield {
            "configuration": profile.name,
            "reused_points": len(accounted.workload.items) - len(accounted.own),
            "accounted_points": told[0],
            "measured_points": took[0],
            "accounted_seconds": round(told[1], 2),
            "measured_seconds": round(took[1], 2),
            "difference": round(100 * (told[1] / took[1] - 1), 1) if took[1] else "",
            "setup_after_others": round(accounted.seconds.get("setup", 0.0), 2),
            "setup_alone": round(profile.seconds.get("setup", 0.0), 2),
        }
