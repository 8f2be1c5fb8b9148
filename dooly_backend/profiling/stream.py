"""Whole steps as the engine runs them by default, in a row: what a step really takes.

On a GPU with compiled code and CUDA graphs nothing inside a step can be timed
on its own. So the step is: many equal ones, each launched before the tokens of
the one before it are waited for, which is what asynchronous scheduling does. An
engine captures its graphs for all of its layers, so each depth is an engine of
its own. What a step takes beyond its operations is fitted later
(`regression/stream_cost.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dooly_backend.database import Database
from dooly_backend.database.records import (
    Configuration,
    KvCapacity,
    StepMode,
    StreamStep,
)
from dooly_backend.engines import Engine
from dooly_backend.engines.kv_cache import GIB, kv_cache_bytes
from dooly_backend.errors import EngineError, InputError
from dooly_backend.profiling.device_lock import device_lock
from dooly_backend.profiling.memory import is_out_of_memory
from dooly_backend.profiling.progress import Progress, Silent
from dooly_backend.profiling.stream_batches import STREAM_BATCHES
from dooly_backend.profiling.timer import quiet_process
from dooly_backend.regression.stream_cost import ROW
from dooly_backend.simulation.execution import Execution, Mode
from dooly_backend.simulation.records import Batches
from dooly_backend.workload import Batch

REPEATS = ROW
ALONE = 5  # steps that are waited for, of every batch
SHALLOW = 4  # layers
_ROOM = 0.95  # of the device
_SPARE_BYTES = 6 * GIB  # contexts, graphs, activations
_NAMES: dict[Mode, StepMode] = {
    Mode.EAGER: "eager",
    Mode.PIECEWISE: "piecewise",
    Mode.FULL: "full",
}


@dataclass
class Streamed:
    """What measuring steps in a row did."""

    known: int = 0
    measured: int = 0
    reasons: dict[str, str] = field(default_factory=dict)  # by batch: why it cannot run


def place_of(engine: Engine, database: Database) -> tuple[int, int]:
    """Row ids of the engine's configuration and environment; a known call graph is left alone."""
    environment_id = database.add_environment(engine.environment)
    wanted = engine.configuration.digest
    known = {each.digest: i for i, each in database.configurations().items()}
    if wanted in known:
        return known[wanted], environment_id
    return database.add_configuration(engine.configuration, (), environment_id), environment_id


def measure_stream(
    engine: Engine,
    database: Database,
    batches: Sequence[Batch] = STREAM_BATCHES,
    repeats: int = REPEATS,
    progress: Progress | None = None,
    again: bool = False,
    ahead: Callable[[], None] = lambda: None,
) -> Streamed:
    """Time `repeats` steps of each of `batches` that the database lacks at the engine's depth.

    With `again` of all of them, and what is known gets the samples besides. `ahead` is called
    before every batch. Every batch is committed as soon as it is measured: a run that is
    killed goes on where it stopped.
    """
    progress = progress or Silent()
    # On a CPU launching is computing: nothing comes before it.
    alone = ALONE if engine.environment.device_kind == "cuda" else 0
    ids = place_of(engine, database)
    known = {step.batch for step in database.stream_steps(*ids) if _same_depth(step, engine)}
    wanted = [batch for batch in batches if again or batch not in known]
    done = Streamed(known=len(batches) - len(wanted))
    progress.phase(f"timing steps in a row, {engine.num_layers} layers", len(wanted))
    with quiet_process():
        for batch in wanted:
            ahead()
            found = stream_step(engine, batch, repeats, alone)
            if isinstance(found, str):
                done.reasons[batch.key] = found
            else:
                database.record_stream_step(*ids, found, add=again)
                done.measured += 1
            progress.advance()
    return done


def stream_step(engine: Engine, batch: Batch, repeats: int, alone: int = 0) -> StreamStep | str:
    """`repeats` steps of `batch` in a row, then `alone` by themselves, or why they cannot run."""
    try:
        # Predictions suppose uniform routing; a graph has it from its capture.
        with device_lock(engine.device), engine.routed("uniform"):
            steps = engine.pipelined_steps(batch, repeats)
            waited_for = alone_us(engine, batch, alone) if alone else []
    except EngineError as error:
        return str(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return f"out of memory: {(str(error).splitlines() or [repr(error)])[0]}"
    mode, padded = mode_of(engine, batch)
    return StreamStep(
        batch,
        engine.num_layers,
        mode,
        padded,
        tuple(round(step.interval_us, 1) for step in steps),
        tuple(round(step.launch_us, 1) for step in steps),
        tuple(round(step.device_us, 1) for step in steps if step.device_us is not None),
        tuple(round(us, 1) for us in waited_for),
    )


def alone_us(engine: Engine, batch: Batch, repeats: int) -> list[float]:
    """Times of steps on an idle device, from handing each over until it is done; microseconds.

    Raises EngineError for a batch that the engine has no room for.
    """
    found: list[float] = []

    def run(step: Callable[[], None]) -> None:
        start = time.perf_counter_ns()
        step()
        engine.synchronize()
        found.append((time.perf_counter_ns() - start) / 1000)

    engine.live_steps(batch, repeats, run)
    return found


def mode_of(engine: Engine, batch: Batch) -> tuple[StepMode, int]:
    """How the engine runs `batch`, and its tokens with padding."""
    rule = Execution.served(engine.graphs, engine.max_num_reqs)
    as_array = Batches.of([batch])
    modes, padded = rule.modes(
        as_array.total(as_array.query), as_array.num_reqs, as_array.query.max(keepdims=True)
    )
    return _NAMES[Mode(modes[0])], int(padded[0])


def engine_bytes(
    capacity: KvCapacity, configuration: Configuration, layers: int, on_gpu: bool = True
) -> int:
    """Memory of the device that an engine of so many `layers` takes.

    Roughly: weights in proportion (embeddings, too, which a shallow one has
    whole), the KV cache that Dooly asks for, and what comes with any engine.
    """
    weights = capacity.weight_bytes * layers // configuration.layers_run
    cache = kv_cache_bytes(configuration.hf_config, layers, on_gpu, configuration.dtype)
    return weights + cache + (_SPARE_BYTES if on_gpu else GIB)


def deepest(capacity: KvCapacity, configuration: Configuration, on_gpu: bool = True) -> int:
    """The most layers of which an engine fits into the device. Raises InputError for none."""
    for layers in range(configuration.layers_run, 0, -1):
        if engine_bytes(capacity, configuration, layers, on_gpu) <= capacity.device_bytes * _ROOM:
            return layers
    raise InputError(
        f"no layer of {configuration.model} fits into {capacity.device_bytes / GIB:.0f} GiB: "
        "divide the model"
    )


def _same_depth(step: StreamStep, engine: Engine) -> bool:
    return step.num_layers == engine.num_layers
