"""The host's part of a step, beside launching it: measured with the engine's real scheduler."""

from __future__ import annotations

from dooly_backend.database import Database
from dooly_backend.database.records import Configuration, Environment
from dooly_backend.engines.vllm_host import host_steps
from dooly_backend.errors import InputError
from dooly_backend.profiling.timer import quiet_process
from dooly_backend.simulation.records import ServingLimits

REQUESTS = (1, 4, 16, 64, 128, 256)
REPEATS = 30
_BLOCKS = 4096
_LONGEST = 2048  # tokens a request


def measure_host(database: Database, ids: tuple[int, int], max_num_seqs: int = 256) -> int:
    """Time scheduling and output of decode steps, where the database lacks it; how many sizes.

    `ids` are the row ids of configuration and environment, which is this
    host's. No engine may run in this process. Raises InputError for another engine.
    """
    configuration = database.configurations()[ids[0]]
    environment = database.environments()[ids[1]]
    if configuration.engine != "vllm":
        raise InputError(f"the scheduler of {configuration.engine} is not known: use vllm")
    known = {step.num_reqs for step in database.host_steps(*ids)}
    missing = [n for n in REQUESTS if n <= max_num_seqs and n not in known]
    if missing:
        limits = _limits(configuration, environment, max_num_seqs)
        with quiet_process():
            found = host_steps(limits, missing, REPEATS)
        for step in found:
            database.record_host_step(*ids, step)
    return len(missing)


def _limits(
    configuration: Configuration, environment: Environment, max_num_seqs: int
) -> ServingLimits:
    return ServingLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=_LONGEST,
        num_gpu_blocks=_BLOCKS,
        block_size=configuration.block_size,
        async_scheduling=environment.device_kind != "cpu",
        version=environment.engine_version,
    )
