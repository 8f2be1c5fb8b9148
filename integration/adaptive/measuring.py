"""What both sweeps measure, and the held-out places, each in a database of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dooly_backend.config import AdaptiveSweep, VidurSweep, load_sweep
from dooly_backend.database import Database
from dooly_backend.database.records import Signature
from dooly_backend.engines import Engine
from dooly_backend.errors import DoolyError
from dooly_backend.operations.callgraph import occurrences, signatures
from dooly_backend.operations.runnable import Entry, resolve
from dooly_backend.profiling.measure import Regime
from dooly_backend.profiling.planners import group_of
from dooly_backend.profiling.profiler import (
    Done,
    Run,
    measure_batch,
    measure_doubted,
    measure_work,
)
from dooly_backend.profiling.progress import Silent
from dooly_backend.profiling.rounds import Work, next_work
from dooly_backend.profiling.sharing import Sharing
from dooly_backend.profiling.sweep import batch_of, sweep_points
from dooly_backend.profiling.timer import Timer, quiet_process, timer_for
from dooly_backend.profiling.watch import WatchedRun, watch_for
from dooly_backend.tracing.tracer import trace_model
from dooly_backend.workload import WorkloadPoint
from integration.adaptive.held_out import Caps, attention_places, token_places
from integration.adaptive.turns import taking_turns

#: Of the adaptive sweep: what it aims at, on average over how many points, and the most points
#: of a curve or plane, such that a signature has at most a fifth of the grid's (131 and 1,101 on
#: a CPU; scattered batches have half as many each). A mean of the default four reaches it by luck.
TARGET, HELD_OUT_POINTS, POINTS = 0.01, 8, {"linear": 26, "attention": 73}
SHARE = 1 / 5
ADAPTIVE, VIDUR, HELD_OUT = "adaptive", "vidur", "held-out"


@dataclass(frozen=True)
class Bench:
    """The engine, and the signatures of one kind that are measured."""

    engine: Engine
    timer: Timer
    signed: Mapping[Entry, Signature]
    wanted: Sequence[Signature]
    caps: Caps

    def sweep(self, sweep: AdaptiveSweep | VidurSweep, path: Path) -> Iterator[None]:
        """Measure all of `sweep` into the database at `path`, a captured step a turn.

        The steps of a round come in an order drawn at random: a drift of the host
        shall not follow the grid. What the turns took is kept with the run.
        """
        with Database.open(path, create=True) as database:
            ids = self._ids(database)
            with Sharing(database, ids[1], self.engine.device) as sharing:
                run = Run(
                    self.engine, self.timer, database, ids, self.signed,
                    {s.hash: s for s in self.wanted}, Regime(), Silent(), sharing,
                    WatchedRun(watch_for(self.engine.environment)),
                )  # fmt: skip
                seconds = 0.0
                for turn in self._turns(run, sweep):
                    start = time.perf_counter()
                    turn()
                    seconds += time.perf_counter() - start
                    yield
                conditions = run.watched.conditions()
                facts = conditions.facts | {"seconds": seconds}
                database.record_run(*ids, replace(conditions, facts=facts))

    def _turns(self, run: Run, sweep: AdaptiveSweep | VidurSweep) -> Iterator[Callable[[], None]]:
        """What `run_sweep` does, step by step."""
        done, source = Done(), random.Random(0)

        def next_round() -> Work:
            return next_work(run.engine, run.database, run.ids[1], run.by_hash.values(), sweep)

        while (work := next_round()).points:
            batches = list(work.by_batch)
            source.shuffle(batches)
            for batch in batches:
                yield partial(measure_work, run, Work({batch: work.by_batch[batch]}), done)
            fresh = {key for keys in work.by_batch.values() for key in keys}
            yield partial(measure_doubted, run, fresh, sweep, done)

    def at(self, points: Iterable[WorkloadPoint], path: Path) -> Iterator[None]:
        """Measure every signature at `points` into the database at `path`, one a turn."""
        with Database.open(path, create=True) as database:
            configuration_id, environment_id = self._ids(database)
            for point in points:
                keys = [(s.hash, point) for s in self.wanted]
                batch = batch_of(point, self.engine)
                found = measure_batch(self.engine, self.timer, batch, keys, self.signed, Regime())
                if isinstance(found, str):
                    raise DoolyError(f"{batch.key}: {found}")
                for s in self.wanted:
                    measurement = found[s.hash, point]
                    database.record(s, environment_id, measurement, configuration_id)
                yield

    def _ids(self, database: Database) -> tuple[int, int]:
        environment_id = database.add_environment(self.engine.environment)
        graph = occurrences(self.engine, dict(self.signed))
        configuration = self.engine.configuration
        return database.add_configuration(configuration, graph, environment_id), environment_id


def measure(bench: Bench, kind: str, count: int, folder: Path) -> None:
    """Both sweeps and `count` held-out places of a shape, into three databases in `folder`.

    A host drifts, so all three are measured together, in turns as many of each as
    shall let them end at about the same time.
    """
    caps = bench.caps
    places = (token_places if kind == "linear" else attention_places)(caps, count)
    default = load_sweep("adaptive")
    assert isinstance(default, AdaptiveSweep)
    limits = {"tokens": caps.tokens, "requests": caps.batch, "context": caps.length}
    aims = {"target": TARGET, "points": POINTS[kind], "held_out": HELD_OUT_POINTS}
    adaptive = default.model_copy(update=limits | aims)
    vidur = VidurSweep(
        name=VIDUR, rule="vidur", tokens=caps.tokens, length=caps.length, batch=caps.batch
    )
    with quiet_process():
        grid = len(sweep_points(bench.wanted[0], vidur, bench.engine))
        taking_turns(
            {
                bench.sweep(adaptive, folder / f"{kind}-{ADAPTIVE}.db"): SHARE * grid,
                bench.sweep(vidur, folder / f"{kind}-{VIDUR}.db"): grid,
                bench.at(places, folder / f"{kind}-{HELD_OUT}.db"): len(places),
            }
        )


def benches(engine: Engine, caps: Caps, kinds: Sequence[str]) -> dict[str, Bench]:
    """What to measure of each kind: the linear layers, or attention."""
    trace = trace_model(engine)
    signed = signatures(trace, resolve(trace, engine), engine)
    distinct = {s.hash: s for s in signed.values()}.values()
    timer = timer_for(engine)
    chosen = {
        "linear": [s for s in distinct if s.kind == "tokens" and group_of(s) == "linear"],
        "attention": [s for s in distinct if s.is_attention],
    }
    return {kind: Bench(engine, timer, signed, chosen[kind], caps) for kind in kinds}
