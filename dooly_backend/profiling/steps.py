"""Live steps beside the sums of their operations: the step's own cost."""

from __future__ import annotations

import math
from dataclasses import replace

from dooly_backend.database import Database
from dooly_backend.database.records import StepMeasurement
from dooly_backend.engines import Engine
from dooly_backend.engines.parallel import is_collective
from dooly_backend.profiling.measure import step_samples
from dooly_backend.profiling.progress import Progress
from dooly_backend.profiling.timer import Timer
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.regression.step_cost import fit_step_cost
from dooly_backend.workload import Batch


def measure_steps(
    engine: Engine,
    timer: Timer,
    database: Database,
    ids: tuple[int, int],
    progress: Progress,
    repeats: int = 9,
) -> None:
    """Time live steps, and fit the step's own cost. `ids`: of configuration and environment."""
    batches = step_batches(engine)
    depths = sorted({1, engine.num_layers})
    progress.phase("timing whole steps", len(batches) * len(depths))
    model = _model(engine, database)
    for batch in batches:
        for layers in depths:
            # Predictions suppose uniform routing; that of dummy weights is not.
            with engine.routed("uniform"):
                live = step_samples(engine, timer, batch, layers, repeats)
            operations = operations_us(engine, model, batch, layers)
            database.record_step(
                *ids, StepMeasurement(batch, layers, live, operations), replace=True
            )
            progress.advance()
    database.set_step_cost(*ids, fit_step_cost(database.steps(*ids)))


def refit_steps(engine: Engine, database: Database, ids: tuple[int, int]) -> bool:
    """Fit the step's own cost again if more points give other sums of the operations."""
    model = _model(engine, database)
    stored = database.steps(*ids)
    now = [
        replace(step, operations_us=operations_us(engine, model, step.batch, step.num_layers))
        for step in stored
    ]
    changed = [
        after
        for before, after in zip(stored, now, strict=True)
        if not math.isclose(before.operations_us, after.operations_us, rel_tol=1e-9)
    ]
    if not changed:
        return False
    # The cost first: killed in between, the next run finds sums that differ, and goes on.
    database.set_step_cost(*ids, fit_step_cost(now))
    for step in changed:
        database.record_step(*ids, step, replace=True)
    return True


def _model(engine: Engine, database: Database) -> LatencyModel:
    return LatencyModel.load(database, engine.configuration.digest, engine.environment.digest)


def step_batches(engine: Engine) -> list[Batch]:
    """Small steps, whose own cost is not lost in their operations' noise."""
    context = min(256, engine.max_model_len // 2)
    counts = [n for n in (1, 4, 16) if n <= engine.max_num_reqs]
    prefills = [Batch.prefill(n) for n in (32, 128) if n < engine.max_model_len]
    return [Batch.decode(n, context) for n in counts] + prefills


def operations_us(engine: Engine, model: LatencyModel, batch: Batch, layers: int) -> float:
    """Sum of the operations in a step of the first `layers` layers, which does not communicate."""
    total = 0.0
    for occurrence in model.occurrences:
        if is_collective(occurrence.signature.name):
            continue
        count: float = 1
        if occurrence.layers:
            inside = sum(1 for layer in occurrence.layers if layer < engine.stage.start + layers)
            count = occurrence.count / len(occurrence.layers) * inside
        total += count * model.occurrence(occurrence, batch).median_us
    return total
