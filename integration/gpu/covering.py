"""How the entries of a runnable set cover what a step launched: counts and times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dooly_backend.errors import InputError
from integration.gpu.launches import (
    ENTRY,
    MODULE,
    Range,
    Work,
    device_work,
    enclosing,
    events,
    host_work,
    ranges,
)

UNLINKED = "without a launch in the trace"


@dataclass(frozen=True)
class Tally:
    """Works of one sort; `us` is the sum of their times."""

    count: int = 0
    us: float = 0.0

    @classmethod
    def of(cls, work: Iterable[Work]) -> Tally:
        times = [one.us for one in work]
        return cls(len(times), sum(times))

    def json(self) -> dict[str, Any]:
        return {"count": self.count, "us": round(self.us, 1)}


@dataclass(frozen=True)
class Cover:
    """Where the work of one step lies.

    `inside` is what modules launched: the forward pass, the logits and the sampler.
    Of it, `once` lies under one entry, `gaps` under none and `doubles` under several.
    `outside` is what no module launched, by where in the step: it belongs to no
    entry, but to the step's own cost. `idle` are the entries that launched nothing.
    """

    inside: tuple[Work, ...]
    once: tuple[Work, ...]
    gaps: tuple[tuple[str, Work], ...]  # with the innermost module's path
    doubles: tuple[tuple[str, Work], ...]  # with the ranges
    outside: Mapping[str, tuple[Work, ...]]
    idle: tuple[int, ...]

    @property
    def is_exact(self) -> bool:
        """Everything that modules launched lies under exactly one entry."""
        return not self.gaps and not self.doubles and UNLINKED not in self.outside


def cover_of(trace: Mapping[str, Any], entries: int, on_device: bool) -> Cover:
    """The cover of one step's trace by `entries` entries.

    Raises InputError for a trace that holds none of their ranges.
    """
    found = events(trace)
    around = ranges(found)
    if not any(one.name.startswith(ENTRY) for one in around):
        raise InputError("the trace has no range of an entry: was the step run inside the ranges?")
    work = device_work(found) if on_device else host_work(found)
    return covered(work, around, entries)


def covered(work: Iterable[Work], around: Sequence[Range], entries: int) -> Cover:
    """Attribute every work to the entries around its launch."""
    modules = [one for one in around if one.name.startswith(MODULE)]
    begin = min((one.start for one in modules), default=0.0)
    end = max((one.end for one in modules), default=0.0)
    inside, once, gaps, doubles = [], [], [], []
    outside: dict[str, list[Work]] = defaultdict(list)
    busy: set[str] = set()
    for one, open_ranges in enclosing(work, around):
        own = [r.name for r in open_ranges if r.name.startswith(ENTRY)]
        paths = [r.name.removeprefix(MODULE) for r in open_ranges if r.name.startswith(MODULE)]
        if not own and not paths:
            outside[_part(one, begin, end)].append(one)
            continue
        inside.append(one)
        busy.update(own)
        if len(own) == 1:
            once.append(one)
        elif own:
            doubles.append((", ".join(own), one))
        else:
            gaps.append((paths[-1] or "the model", one))
    return Cover(
        tuple(inside),
        tuple(once),
        tuple(gaps),
        tuple(doubles),
        {part: tuple(of) for part, of in outside.items()},
        tuple(i for i in range(entries) if f"{ENTRY}{i}" not in busy),
    )


def _part(work: Work, begin: float, end: float) -> str:
    """Where in the step lies what no module launched."""
    if work.at is None:
        return UNLINKED
    if work.at < begin:
        return "before the model"
    return "between model and sampler" if work.at < end else "after the sampler"


def by_name(work: Iterable[Work]) -> list[dict[str, Any]]:
    """Counts and times by name, the longest first."""
    named: dict[str, list[Work]] = defaultdict(list)
    for one in work:
        named[one.name].append(one)
    rows = [{"name": name, **Tally.of(of).json()} for name, of in named.items()]
    return sorted(rows, key=lambda row: -row["us"])


def difference(own: Iterable[Work], other: Iterable[Work]) -> dict[str, int]:
    """By name, how many more works `own` has than `other`; only what differs."""
    counts = Counter(one.name for one in own)
    counts.subtract(one.name for one in other)
    return {name: count for name, count in sorted(counts.items()) if count}


def report(cover: Cover) -> dict[str, Any]:
    """A cover as JSON: tallies, and the names of all that lies under no or several entries."""
    return {
        "exact": cover.is_exact,
        "inside": Tally.of(cover.inside).json(),
        "once": Tally.of(cover.once).json(),
        "gaps": Tally.of(work for _, work in cover.gaps).json(),
        "doubles": Tally.of(work for _, work in cover.doubles).json(),
        "gap_names": _placed(cover.gaps),
        "double_names": _placed(cover.doubles),
        "outside": {
            part: {**Tally.of(of).json(), "names": by_name(of)}
            for part, of in sorted(cover.outside.items())
        },
        "idle": len(cover.idle),
    }


def _placed(work: Iterable[tuple[str, Work]]) -> list[dict[str, Any]]:
    placed: dict[str, list[Work]] = defaultdict(list)
    for where, one in work:
        placed[where].append(one)
    return [{"where": where, **row} for where, of in placed.items() for row in by_name(of)]
