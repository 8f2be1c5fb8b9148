"""What profiling a corpus cost, and would have cost otherwise, from one database.

Everything is summed from seconds that were measured: those of every point's samples
(the table `measurement_cost`), and those of the parts of every run (its facts). What a
configuration would have measured alone are the points of its sweep within its
engine's limits; their seconds are those of the one time that somebody measured them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dooly_backend.config import AdaptiveSweep
from dooly_backend.database import Database
from dooly_backend.database.records import Configuration, Occurrence, RunConditions, Signature
from dooly_backend.profiling.planners import Item, Workload, group_of
from dooly_backend.profiling.sweep import LIMITS, batch_of, fits, sweep_points
from dooly_backend.sweeps import sweep_of
from dooly_backend.workload import WorkloadPoint
from integration.corpus.corpora import CASES, Case, Corpus
from integration.corpus.summary import Figures

#: Parts of a run, in order (`profiling/watch.py`); starting the engine ("boot") is beside them.
PARTS = ("trace", "resolve", "setup", "timing", "rest")


@dataclass(frozen=True)
class Limits:
    """What of an engine bounds a sweep's points."""

    max_num_tokens: int
    max_num_reqs: int
    max_request_len: int


@dataclass(frozen=True)
class Point:
    """A measured point of a signature."""

    seconds: float | None  # None: measured before anybody looked at what it costs
    configuration_id: int | None  # from which it was measured


Times = Mapping[tuple[str, str], Point]  # by signature and point


@dataclass(frozen=True)
class Profile:
    """A configuration whose sweep is complete, and what it cost.

    `workload` has an item for every point that it would have measured alone.
    """

    id: int
    configuration: Configuration
    workload: Workload
    calls: int  # in one step of the full model
    began: str  # UTC
    seconds: Mapping[str, float]  # "boot" and PARTS, of all its runs together
    captured_steps: int
    own: tuple[Item, ...]  # those that were measured from it
    skipped: int  # points that cannot run
    untimed: int  # points whose cost is not known: they are in no sum
    names: Mapping[str, str]  # of its signatures

    @property
    def case(self) -> Case | None:
        last = self.configuration.model.rpartition("/")[2]
        return next((case for case in CASES if case.name == last), None)

    @property
    def name(self) -> str:
        return f"{self.configuration.model.rpartition('/')[2]} {self.configuration.backend}"

    @property
    def device_s(self) -> float:
        """For how long it took the device from others, starting the engine left out."""
        return sum(self.seconds.get(part, 0.0) for part in PARTS)

    @property
    def is_of_known_geometry(self) -> bool:
        """Whether its attention and experts were known: what is left are other operations."""
        return not any(item.group in ("attention", "moe") for item in self.own)


@dataclass(frozen=True)
class Account:
    """All complete profiles of one sweep in one environment, in the order they began."""

    sweep: str
    device: str
    profiles: tuple[Profile, ...]
    incomplete: tuple[str, ...]  # configurations that were begun

    def of(self, corpus: Corpus) -> Figures:
        """The part that belongs to a corpus, as its planners and tables take it."""
        found = _as_published(p for p in self.profiles if p.case and corpus.name in p.case.corpora)
        there = {p.case.name for p in found if p.case}
        return Figures(
            corpus,
            "measured",
            tuple(p.workload for p in found),
            tuple(case.name for case in corpus.cases if case.name not in there),
            sum(p.calls for p in found),
        )

    @property
    def seconds(self) -> dict[str, float]:
        """What all runs took by part."""
        return {
            part: sum(p.seconds.get(part, 0.0) for p in self.profiles) for part in ("boot", *PARTS)
        }


def _as_published(profiles: Iterable[Profile]) -> list[Profile]:
    """One profile for each model and backend: with graphs and unquantised, where there is such."""
    chosen: dict[str, Profile] = {}
    for profile in profiles:
        known = chosen.get(profile.name)
        if known is None or _strangeness(profile) < _strangeness(known):
            chosen[profile.name] = profile
    return list(chosen.values())


def _strangeness(profile: Profile) -> tuple[bool, bool]:
    served = profile.configuration
    return served.quantization != "none", served.execution_mode != "full_graph"


def account(database: Database, environment_id: int, sweep: str) -> Account:
    """What the configurations whose runs finished `sweep` in that environment cost."""
    times = times_of(database, environment_id)
    profiles, incomplete = [], []
    for i, configuration in database.configurations().items():
        runs = [
            run
            for run in database.runs(i, environment_id)
            if run.facts.get("sweep", {}).get("name") == sweep
        ]
        if not runs:
            continue
        finished = [run for run in runs if run.facts.get("complete")]
        if finished:
            wanted = Wanted.of(finished[-1])
            graph = database.occurrences(i, environment_id)
            profiles.append(profile_of((i, configuration), graph, runs, wanted, times))
        else:
            incomplete.append(f"{configuration.model} {configuration.backend}")
    return Account(
        sweep,
        database.environments()[environment_id].device,
        tuple(sorted(profiles, key=lambda profile: profile.began)),
        tuple(incomplete),
    )


def sweeps_in(database: Database, environment_id: int) -> list[str]:
    """The sweeps that runs in the environment were for, by name."""
    runs = (r for i in database.configurations() for r in database.runs(i, environment_id))
    return sorted({run.facts["sweep"]["name"] for run in runs if "sweep" in run.facts})


def times_of(database: Database, environment_id: int) -> dict[tuple[str, str], Point]:
    """Every measured point of an environment."""
    cost_us = database.timing_us(environment_id)
    with database.reading() as connection:
        found = connection.execute(
            "SELECT m.signature, p.key, m.configuration_id FROM measurement AS m"
            " JOIN workload_point AS p ON p.id = m.point_id WHERE m.environment_id = ?",
            (environment_id,),
        ).fetchall()
    keyed = {(row["signature"], row["key"]): row["configuration_id"] for row in found}
    return {
        key: Point(cost_us[key] / 1e6 if key in cost_us else None, configuration_id)
        for key, configuration_id in keyed.items()
    }


@dataclass(frozen=True)
class Wanted:
    """What a run was for."""

    sweep: Any
    limits: Limits

    @classmethod
    def of(cls, run: RunConditions) -> Wanted:
        """From the facts of a run."""
        sweep = sweep_of(run.facts["sweep"], f"the run of {run.started_at}")
        return cls(sweep, Limits(**{name: run.facts["limits"][name] for name in LIMITS}))

    def points(self, signature: Signature, measured: Iterable[str]) -> list[str]:
        """Keys of the points of `signature`: the grid's, or those that a sweep has placed."""
        if isinstance(self.sweep, AdaptiveSweep):
            points = map(WorkloadPoint.parse, measured)
            return [p.key for p in points if fits(batch_of(p, self.limits), self.limits)]
        return [point.key for point, _ in sweep_points(signature, self.sweep, self.limits)]


def profile_of(
    which: tuple[int, Configuration],
    graph: Sequence[Occurrence],
    runs: Sequence[RunConditions],
    wanted: Wanted,
    times: Times,
) -> Profile:
    """A configuration and its row id, from its call graph, its runs of the sweep, and all times."""
    id_, configuration = which
    by_signature: dict[str, list[str]] = {}
    for hash_, key in times:
        by_signature.setdefault(hash_, []).append(key)
    items: list[Item] = []
    own: list[Item] = []
    skipped = untimed = 0
    for signature in {o.signature.hash: o.signature for o in graph}.values():
        for key in wanted.points(signature, by_signature.get(signature.hash, ())):
            point = times.get((signature.hash, key))
            if point is None:
                skipped += 1
            elif point.seconds is None:
                untimed += 1
            else:
                group = group_of(signature)
                items.append(Item(signature.hash, group, 1, point.seconds, key))
                if point.configuration_id == id_:
                    own.append(items[-1])
    seconds: dict[str, float] = {}
    for run in runs:
        for part, took in run.facts.get("spent_s", {}).items():
            seconds[part] = seconds.get(part, 0.0) + took
    served = configuration.model, configuration.backend, configuration.hf_config
    return Profile(
        id_,
        configuration,
        Workload(*served, tuple(items)),
        sum(o.count for o in graph),
        runs[0].started_at,
        seconds,
        sum(run.facts.get("captured_steps", 0) for run in runs),
        tuple(own),
        skipped,
        untimed,
        {o.signature.hash: o.signature.name for o in graph},
    )
