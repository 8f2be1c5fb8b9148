"""The duplication-aware profiler (paper section 6): times what the database does not know."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dooly_backend.config import AdaptiveSweep, Grid
from dooly_backend.database import Database
from dooly_backend.database.records import RunConditions, Signature
from dooly_backend.engines import CapturedCall, Engine
from dooly_backend.errors import EngineError, InputError
from dooly_backend.operations.callgraph import occurrences, signatures
from dooly_backend.operations.capture import Key, captured
from dooly_backend.operations.runnable import Entry, RunnableSet, resolve
from dooly_backend.profiling.collective_calls import (
    collective_calls,
    missing_points,
    occurrences_of,
    record_collectives,
)
from dooly_backend.profiling.collectives import Collective
from dooly_backend.profiling.confirm import TOLERANCE, Confirmation, confirm
from dooly_backend.profiling.device_lock import device_lock
from dooly_backend.profiling.measure import (
    Regime,
    Subject,
    WorkloadPointKey,
    measure,
)
from dooly_backend.profiling.memory import is_out_of_memory
from dooly_backend.profiling.progress import Progress, Silent
from dooly_backend.profiling.reuse import Reused, reused
from dooly_backend.profiling.rounds import Work, doubted_work, next_work
from dooly_backend.profiling.sharing import Sharing
from dooly_backend.profiling.steps import measure_steps, refit_steps
from dooly_backend.profiling.sweep import LIMITS, record_limits
from dooly_backend.profiling.timer import Timer, quiet_process, timed, timer_for
from dooly_backend.profiling.watch import Found, WatchedRun, watch_for
from dooly_backend.sweeps import described
from dooly_backend.tracing.trace import Trace
from dooly_backend.tracing.tracer import trace_model
from dooly_backend.workload import Batch, WorkloadPoint

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileResult:
    """What a profile run found and did."""

    model: str
    ids: tuple[int, int]  # row ids of configuration and environment
    operations: int  # seen in the traced pass
    occurrences: int  # calls of one step of the full model that are measured
    signatures_known: int
    signatures_new: int
    points: int  # newly measured
    skipped: int  # newly found impossible
    unstable: int
    seconds: float
    trace: Trace = field(repr=False)
    runnable: RunnableSet = field(repr=False)
    reused: tuple[Reused, ...] = ()  # signatures that needed no measuring
    reasons: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # skipped points by reason
    confirmation: Confirmation | None = None  # of an older environment's points


def profile(
    engine: Engine,
    database: Database,
    sweep: Grid | AdaptiveSweep,
    regime: Regime | None = None,
    progress: Progress | None = None,
    confirm_from: int | None = None,
    tolerance: float = TOLERANCE,
) -> ProfileResult:
    """Trace the engine's model, skip what `database` knows, measure the rest.

    Every point is committed as soon as it is measured: a run that is killed
    goes on where it stopped. The run's row (`RunConditions`) tells what it was for and
    what its parts took, also of a first run that finds everything known.
    `confirm_from` is the row id of an environment from which points are taken over
    where few of them have not moved by more than `tolerance`.
    """
    start = time.perf_counter()
    progress = progress or Silent()
    progress.phase("tracing")
    seconds = {} if engine.boot_s is None else {"boot": engine.boot_s}
    with device_lock(engine.device, lambda: progress.phase("waiting for the device")):
        with timed(seconds, "trace"):
            trace = trace_model(engine)
        progress.phase("finding what runs alone")
        with timed(seconds, "resolve"):
            runnable = resolve(trace, engine)
    signed = signatures(trace, runnable, engine)
    environment_id = database.add_environment(engine.environment)
    graph = occurrences(engine, signed)
    calls = collective_calls(trace, engine)
    wanted = {occurrence.signature.hash for occurrence in graph}
    graph += occurrences_of(calls, len(graph))
    every = {occurrence.signature for occurrence in graph}
    configuration_id = database.add_configuration(engine.configuration, graph, environment_id)
    signed = {entry: signature for entry, signature in signed.items() if signature.hash in wanted}
    timer = timer_for(engine)
    ids = configuration_id, environment_id
    _record_capacity(engine, database, ids)
    limited = record_limits(engine, database, environment_id, set(signed.values()), sweep)
    with quiet_process(), Sharing(database, environment_id, engine.device) as sharing:
        by_hash = {signature.hash: signature for signature in signed.values()}
        run = Run(
            engine, timer, database, ids, signed, by_hash, regime or Regime(), progress, sharing,
            WatchedRun(
                watch_for(engine.environment), about=purpose(engine, sweep), seconds=seconds
            ),
        )  # fmt: skip
        done = Done()
        confirmation = None
        if confirm_from is not None:
            progress.phase("confirming")
            confirmation = confirm(
                engine, database, confirm_from, environment_id, by_hash.values(),
                lambda work: measure_work(run, work, done), tolerance,
            )  # fmt: skip
        run_sweep(run, sweep, done)
        _record_complete(run)

        def not_measured() -> dict[Collective, list[WorkloadPoint]]:
            return missing_points(calls, database, environment_id, sweep, engine)

        with sharing.once(
            f"collectives {engine.configuration.digest}", lambda: not not_measured()
        ) as ours:
            if ours:
                rest = not_measured()
                progress.phase("timing collectives", sum(map(len, rest.values())))
                done.points += record_collectives(
                    rest, database, ids, regime or Regime(), progress.advance
                )
                done.signatures |= {collective.signature.hash for collective in rest}
        # On a GPU the host launches while the device computes: what a step takes
        # beyond its operations is no sum, and is left to the simulation.
        if engine.environment.device_kind == "cpu":

            def is_fitted() -> bool:
                return database.step_cost(*ids) is not None

            with sharing.once(f"steps {engine.configuration.digest}", is_fitted) as ours:
                if ours:
                    measure_steps(engine, timer, database, ids, progress)
                else:
                    refit_steps(engine, database, ids)
    if done.points and not timer.is_calm:
        log.warning(
            "this host is busy: most calls lost their processor while they were timed; "
            "measure again when it is calm (delete %s first), or leave a core free (--threads)",
            database.path,
        )
    known = {signature for signature in every if signature.hash not in done.signatures}
    reasons = {**limited, **{reason: tuple(keys) for reason, keys in done.reasons.items()}}
    return ProfileResult(
        model=engine.configuration.model,
        ids=ids,
        operations=len(trace.operations),
        occurrences=sum(occurrence.count for occurrence in graph),
        signatures_known=len(known),
        signatures_new=len(done.signatures),
        points=done.points,
        skipped=sum(map(len, reasons.values())),
        unstable=done.unstable,
        seconds=time.perf_counter() - start,
        trace=trace,
        runnable=runnable,
        reused=reused(database, environment_id, known, engine.configuration.model),
        reasons=reasons,
        confirmation=confirmation,
    )


def purpose(engine: Engine, sweep: Grid | AdaptiveSweep) -> dict[str, Any]:
    """Facts of a run: its sweep, and the engine's limits, within which the sweep's points lie."""
    return {
        "sweep": described(sweep),
        "limits": {name: getattr(engine, name) for name in LIMITS},
    }


def _record_complete(run: Run) -> None:
    """Mark the run as one after which its sweep is known; one that measured nothing only once."""
    earlier = (r.facts for r in run.database.runs(*run.ids))
    same = run.watched.about | {"complete": True}
    if run.watched.seen or not any(same.items() <= facts.items() for facts in earlier):
        run.watched.about["complete"] = True
        run.database.record_run(*run.ids, run.watched.conditions())


def _record_capacity(engine: Engine, database: Database, ids: tuple[int, int]) -> None:
    """Keep what decides the number of KV blocks, once for a size of the largest step."""
    known = database.kv_capacity(*ids)
    if known is not None and known.max_num_batched_tokens == engine.max_num_tokens:
        return
    capacity = engine.kv_capacity()
    if capacity is not None:
        database.set_kv_capacity(*ids, capacity)


@dataclass
class Done:
    """What measuring a sweep has done so far."""

    points: int = 0  # newly measured
    unstable: int = 0
    reasons: dict[str, list[str]] = field(default_factory=dict)  # points newly found impossible
    signatures: set[str] = field(default_factory=set)  # that had something to do
    conditions: RunConditions | None = None  # of device and host, where something was measured


@dataclass(frozen=True)
class Run:
    """What measuring needs: `ids` are the row ids of configuration and environment.

    `by_hash` has the signatures to measure, of the `signed` calls.
    """

    engine: Engine
    timer: Timer
    database: Database
    ids: tuple[int, int]
    signed: Mapping[Entry, Signature]
    by_hash: Mapping[str, Signature]
    regime: Regime
    progress: Progress
    sharing: Sharing
    watched: WatchedRun

    def measured(self, batch: Batch, keys: Sequence[WorkloadPointKey]) -> Found | str:
        """Measurements of `keys`, or why they cannot be, with device and host watched."""
        return self.watched.measure(
            partial(measure_batch, self.engine, self.timer, batch, keys, self.signed, self.regime)
        )


def run_sweep(run: Run, sweep: Grid | AdaptiveSweep, done: Done) -> None:
    """Measure what the database lacks for `sweep`."""

    def round_of_work() -> Work:
        return next_work(run.engine, run.database, run.ids[1], run.by_hash.values(), sweep)

    work = round_of_work()
    # How many points an adaptive sweep takes shows while it measures.
    total = None if isinstance(sweep, AdaptiveSweep) else work.points
    run.progress.phase("measuring", total)
    while work.points:
        fresh = {key for keys in work.by_batch.values() for key in keys}
        measure_work(run, work, done)
        measure_doubted(run, fresh, sweep, done)
        work = round_of_work()
    done.conditions = run.watched.conditions() if run.watched.seen else None


def measure_work(run: Run, work: Work, done: Done) -> None:
    """Settle every point of `work`, and record each at once."""
    configuration_id, environment_id = run.ids
    with closing(run.sharing.turns(work.by_batch, run.progress.advance)) as turns:
        for batch, keys in turns:
            found = run.measured(batch, keys)
            for key in keys:
                signature = run.by_hash[key[0]]
                if isinstance(found, str):
                    run.database.skip(signature, environment_id, key[1], found)
                    done.reasons.setdefault(found, []).append(key[1].key)
                else:
                    run.database.record(signature, environment_id, found[key], configuration_id)
                    done.points += 1
                    done.unstable += found[key].unstable
                done.signatures.add(signature.hash)
                run.progress.advance()
            run.database.record_run(configuration_id, environment_id, run.watched.conditions())


def measure_doubted(
    run: Run, fresh: set[WorkloadPointKey], sweep: Grid | AdaptiveSweep, done: Done
) -> None:
    """Measure again what its neighbours contradict; the quicker of the two stays."""
    configuration_id, environment_id = run.ids
    doubts = doubted_work(run.engine, run.database, environment_id, run.by_hash, fresh, sweep)
    for batch, earlier in doubts.items():
        with run.sharing.device():
            found = run.measured(batch, list(earlier))
        if isinstance(found, str):
            continue  # it did run a moment ago: what is there stays
        for key, before in earlier.items():
            if found[key].median_us < before.median_us:
                done.unstable += found[key].unstable - before.unstable
                run.database.record(
                    run.by_hash[key[0]], environment_id, found[key], configuration_id, replace=True
                )
            else:
                run.database.add_timing(key[0], environment_id, key[1], found[key].timing_us or 0.0)


def measure_batch(
    engine: Engine,
    timer: Timer,
    batch: Batch,
    keys: Sequence[WorkloadPointKey],
    signed: Mapping[Entry, Signature],
    regime: Regime,
) -> Found | str:
    """Measurements of `keys` in one captured step, or the reason why it cannot run.

    `signed` are all calls of a step, with their signatures.
    """
    entries = list(signed)
    try:
        with captured(engine, batch, [entry.key for entry in entries]) as calls:
            subjects = {
                key: subject_of(key[0], entries, signed, calls, key[1].num_experts) for key in keys
            }
            return measure(engine, timer, subjects, regime, calls)
    except EngineError as error:
        return str(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return f"out of memory: {(str(error).splitlines() or [repr(error)])[0]}"


def subject_of(
    signature_hash: str,
    entries: Sequence[Entry],
    signed: Mapping[Entry, Signature],
    calls: Sequence[CapturedCall],
    experts: int | None = None,
) -> Subject:
    """The call to time for a signature: the last one, in a layer behind another like it."""
    keys: set[Key] = {entry.key for entry in entries if signed[entry].hash == signature_hash}
    indices = [i for i, call in enumerate(calls) if (call.path, call.ordinal) in keys]
    if not indices:
        raise InputError("the captured step does not run a call that the trace has: trace again")
    chosen = indices[-1]
    others = [i for i in indices if i != chosen]
    # Of other layers, best one with weights of its own (the rotary embedding has none).
    own = [i for i in others if calls[i].target is not calls[chosen].target]
    sibling = next(iter((own or others)[-1:]), None)
    predecessor = calls[chosen - 1] if chosen > 0 else None
    return Subject(
        calls[chosen],
        predecessor,
        calls[sibling] if sibling is not None else None,
        experts,
        tuple(calls[sibling + 1 : chosen]) if sibling is not None else (),
    )
