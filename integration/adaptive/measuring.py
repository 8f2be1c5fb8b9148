"""What both sweeps measure, and the held-out places, each in a database of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from dooly_backend.profiling.profiler import measure_batch, run_sweep
from dooly_backend.profiling.progress import Silent
from dooly_backend.profiling.sharing import Sharing
from dooly_backend.profiling.sweep import batch_of
from dooly_backend.profiling.timer import Timer, quiet_process, timer_for
from dooly_backend.tracing.tracer import trace_model
from dooly_backend.workload import WorkloadPoint
from integration.adaptive.held_out import Caps, attention_places, token_places

#: Of the adaptive sweep: what it aims at, and the most points of a curve or plane, such that a
#: signature has at most a fifth of the grid's (131 and 1,101 on a CPU).
TARGET, POINTS = 0.02, {"linear": 26, "attention": 85}
ADAPTIVE, VIDUR, HELD_OUT = "adaptive", "vidur", "held-out"


@dataclass(frozen=True)
class Bench:
    """The engine, and the signatures of one kind that are measured."""

    engine: Engine
    timer: Timer
    signed: Mapping[Entry, Signature]
    wanted: Sequence[Signature]
    caps: Caps

    def sweep(self, sweep: AdaptiveSweep | VidurSweep, path: Path) -> None:
        """Measure all of `sweep` into the database at `path`."""
        with Database.open(path, create=True) as database:
            ids = self._ids(database)
            with Sharing(database, ids[1], self.engine.device) as sharing:
                run_sweep(
                    self.engine, self.timer, database, ids, self.signed, self.wanted, sweep,
                    Regime(), Silent(), sharing,
                )  # fmt: skip

    def at(self, points: Iterable[WorkloadPoint], path: Path) -> None:
        """Measure every signature at every one of `points` into the database at `path`."""
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

    def _ids(self, database: Database) -> tuple[int, int]:
        environment_id = database.add_environment(self.engine.environment)
        graph = occurrences(self.engine, dict(self.signed))
        configuration = self.engine.configuration
        return database.add_configuration(configuration, graph, environment_id), environment_id


def measure(bench: Bench, kind: str, count: int, folder: Path) -> None:
    """Both sweeps and `count` held-out places of a shape, into three databases in `folder`.

    A host drifts: a third of the places is measured ahead of the sweeps, a third
    between them, a third behind them.
    """
    caps = bench.caps
    places = (token_places if kind == "linear" else attention_places)(caps, count)
    default = load_sweep("adaptive")
    assert isinstance(default, AdaptiveSweep)
    limits = {"tokens": caps.tokens, "requests": caps.batch, "context": caps.length}
    aims = {"target": TARGET, "points": POINTS[kind]}
    adaptive = default.model_copy(update=limits | aims)
    vidur = VidurSweep(
        name=VIDUR, rule="vidur", tokens=caps.tokens, length=caps.length, batch=caps.batch
    )
    held_out = folder / f"{kind}-{HELD_OUT}.db"
    with quiet_process():
        bench.at(places[0::3], held_out)
        bench.sweep(adaptive, folder / f"{kind}-{ADAPTIVE}.db")
        bench.at(places[1::3], held_out)
        bench.sweep(vidur, folder / f"{kind}-{VIDUR}.db")
        bench.at(places[2::3], held_out)


def benches(engine: Engine, caps: Caps, kinds: Sequence[str]) -> dict[str, Bench]:
    """What to measure of each kind: the linear layers, or attention."""
    trace = trace_model(engine)
    signed = signatures(trace, resolve(trace, engine), engine)
    distinct = {s.hash: s for s in signed.values()}.values()
    timer = timer_for(engine)
    chosen = {
        "linear": [
            s for s in distinct if s.kind == "tokens" and group_of(s.name, s.kind) == "linear"
        ],
        "attention": [s for s in distinct if s.kind == "batch"],
    }
    return {kind: Bench(engine, timer, signed, chosen[kind], caps) for kind in kinds}
