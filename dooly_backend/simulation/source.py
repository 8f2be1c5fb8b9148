"""Where a simulation's step times come from: a bundle, or a database that is fitted now."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dooly_backend.config import load_model
from dooly_backend.database import Database
from dooly_backend.database.records import Configuration, Environment
from dooly_backend.errors import DoolyError, InputError
from dooly_backend.regression.bundle import Bundle, BundleConfiguration, load_bundle
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.regression.select import UnmeasuredError, is_called, profile_options, select
from dooly_backend.simulation.execution import OF_CONFIGURATION, Execution, capture_sizes
from dooly_backend.simulation.limits import serving_limits
from dooly_backend.simulation.records import ServingLimits
from dooly_backend.simulation.stages import StageTimer, chosen_stages, left_out, refuse_gaps
from dooly_backend.simulation.step_time import StepModel

log = logging.getLogger(__name__)
Found = TypeVar("Found")


class ProfileFailed(DoolyError):
    """Profiling what was missing failed, with the exit code that it had."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Source:
    """A configuration that was profiled, and the times of its steps.

    Of a pipeline it is the first stage's, and `later` has those of the other stages.
    """

    environment: Environment
    fitted: BundleConfiguration
    later: tuple[BundleConfiguration, ...] = ()

    @property
    def configuration(self) -> Configuration:
        return self.fitted.configuration

    @property
    def stages(self) -> tuple[BundleConfiguration, ...]:
        """All stages; one where there is no pipeline."""
        return (self.fitted, *self.later)

    @property
    def left_out(self) -> list[str]:
        """Communication that was not measured, and that no step time holds."""
        return left_out([(stage.configuration, stage.occurrences) for stage in self.stages])

    def limits(self, given: Mapping[str, Any]) -> ServingLimits:
        """What is given, and vLLM's defaults for the rest (`limits.serving_limits`).

        The stage with the fewest KV blocks decides for all, as in vLLM.
        """
        given = {**given, "pipeline_parallel": len(self.stages)}
        each = [
            serving_limits(stage.configuration, self.environment, given, stage.kv_capacity)
            for stage in self.stages
        ]
        groups = max((limits.kv_groups for limits in each), key=len)
        return replace(min(each, key=lambda limits: limits.num_gpu_blocks), kv_groups=groups)

    def timer(
        self, limits: ServingLimits, execution_mode: str | None = None
    ) -> StepModel | StageTimer:
        """The step times under these limits, which decide what vLLM captures graphs for.

        `execution_mode` is "eager", "piecewise" or "full_graph"; by default as profiled.
        """
        graphs = OF_CONFIGURATION[execution_mode or self.configuration.execution_mode]
        sizes: Sequence[int] = ()
        if graphs != "NONE":
            sizes = capture_sizes(
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                self.environment.engine_version,
            )
        execution = Execution(graphs, sizes, limits.max_num_seqs)
        models = [StepModel.of(stage, execution) for stage in self.stages]
        return StageTimer(models) if self.later else models[0]

    def timer_of(self, served: Mapping[str, Any], limits: ServingLimits) -> StepModel:
        """The step times of a live server that describes itself as `served` (`Run.about`).

        Raises InputError for a pipeline: a live run does not tell its stages apart.
        """
        if self.later:
            raise InputError("live runs of pipelines are not compared: leave out --calibrate")
        return StepModel.of(self.fitted, Execution.served(served, limits.max_num_seqs))

    def with_clock(self, timer: StepModel | StageTimer) -> StepModel:
        """The same step times on a device whose clock gives way as the profile saw.

        Raises InputError where it did not watch, and for a pipeline.
        """
        clock = self.fitted.clock
        if clock is None:
            raise InputError(
                f"the clock of {self.environment.device} was not watched: leave out --device-clock"
            )
        if not isinstance(timer, StepModel):
            raise InputError("a pipeline's devices have steady clocks: leave out --device-clock")
        return timer.with_clock(clock)

    def about(self) -> dict[str, Any]:
        """What was profiled where, for a summary."""
        return {
            "model": self.configuration.model,
            "backend": self.configuration.backend,
            "dtype": self.configuration.dtype,
            "kv_cache_dtype": self.configuration.kv_cache_dtype,
            "quantization": self.configuration.quantization,
            "tensor_parallel": self.configuration.tensor_parallel,
            "pipeline_parallel": len(self.stages),
            "execution_mode": self.configuration.execution_mode,
            "engine": f"{self.environment.engine} {self.environment.engine_version}",
            "device": self.environment.device,
            "left_out": self.left_out,
        }


def from_bundle(
    path: Path, model: str | None, filters: Mapping[str, Any], mode: str | None = None
) -> Source:
    """Of a bundle, from whomever it comes. Raises InputError where it lacks the model or a stage.

    With a filter `pipeline_parallel` above 1 all stages of the pipeline are looked for.
    `mode` is the execution mode to simulate: what was profiled in it is taken, where
    there is such a profile, and else the usual one, with a warning.
    """
    bundle = load_bundle(path)
    known = [each.configuration for each in bundle.configurations]
    stages = _stages(known, model, filters, f"bundle {path}")

    def chosen(wanted: Mapping[str, Any]) -> BundleConfiguration:
        return bundle.configuration(model, **wanted)

    return _source(bundle, [_in_mode(chosen, each, mode) for each in stages], mode)


def from_database(
    db: str,
    model: str,
    environment: str | None,
    filters: Mapping[str, Any],
    mode: str | None = None,
) -> Source:
    """Of what the database measured, fitted now; stages and `mode` are as in `from_bundle`.

    Raises UnmeasuredError where the database does not know the model or a stage,
    InputError where several configurations or environments fit.
    """
    with Database.open(db, read_only=True) as database:
        stored = database.configurations()
        stages = _stages(list(stored.values()), model, filters, f"database {database.path}")

        def of(wanted: Mapping[str, Any]) -> tuple[int, int]:
            return select(database, model, environment, wanted)

        chosen = [_in_mode(of, each, mode) for each in stages]
        digests = [stored[configuration_id].digest for configuration_id, _ in chosen]
        place = database.environments()[chosen[0][1]]
        if any(environment_id != chosen[0][1] for _, environment_id in chosen):
            raise InputError("the stages were measured in several environments: --environment")
        bundle = fit_bundle(database, list(dict.fromkeys(digests)), place.digest)
    fitted = {each.configuration.digest: each for each in bundle.configurations}
    return _source(bundle, [fitted[digest] for digest in digests], mode)


def _in_mode(
    choose: Callable[[Mapping[str, Any]], Found], filters: Mapping[str, Any], mode: str | None
) -> Found:
    """What `choose` finds for the filters, profiled in `mode` if there is such a profile."""
    if mode is not None and filters.get("execution_mode") is None:
        try:
            return choose({**filters, "execution_mode": mode})
        except UnmeasuredError:
            pass  # the usual profile, of which `_source` says that it stands in
    return choose(filters)


def _stages(
    known: Sequence[Configuration], model: str | None, filters: Mapping[str, Any], where: str
) -> list[Mapping[str, Any]]:
    """What selects each stage: the filters alone where there is no pipeline.

    Raises UnmeasuredError that names the stages which `known` lacks.
    """
    count = filters.get("pipeline_parallel") or 1
    if count == 1:
        return [filters]
    given = {name: value for name, value in filters.items() if value is not None}
    profiled = [
        each.stage
        for each in known
        if (model is None or is_called(each, model))
        and all(getattr(each, name) == value for name, value in given.items())
    ]
    chosen = chosen_stages(profiled, count)
    missing = [stage for stage, stands_for in enumerate(chosen) if stands_for is None]
    if missing:
        tensor = given.get("tensor_parallel", 1)
        commands = ", ".join(
            f"`dooly profile {model or 'MODEL'} {' '.join(profile_options(given))} --rank "
            f"{stage * tensor}`"
            for stage in missing
        )
        raise UnmeasuredError(
            f"{where} lacks stage {', '.join(map(str, missing))} of the {count} (from 0) of "
            f"{model}: run {commands}"
        )
    return [{**filters, "stage": stage} for stage in chosen]


def _source(
    bundle: Bundle, stages: Sequence[BundleConfiguration], mode: str | None = None
) -> Source:
    first, *later = stages
    count = first.configuration.pipeline_parallel
    if count != len(stages):
        raise InputError(
            f"{first.configuration.model} is stage {first.configuration.stage} of {count} here: "
            f"simulate the whole pipeline with --pp {count}"
        )
    refuse_gaps([stage.configuration for stage in stages])
    source = Source(bundle.environment, first, tuple(later))
    for what in source.left_out:
        log.warning("not measured, and in no step time: %s", what)
    profiled_in = source.configuration.execution_mode
    if mode not in (None, profiled_in):
        log.warning(
            "%s was not profiled in mode %s: its profile in mode %s stands in, with that "
            "mode's rules", source.configuration.model, mode, profiled_in,
        )  # fmt: skip
    return source


def profiled(
    db: str,
    model: str,
    environment: str | None,
    filters: Mapping[str, Any],
    arguments: Sequence[str],
    model_argument: str | None = None,
    mode: str | None = None,
) -> Source:
    """As `from_database`; what is missing is profiled into it first.

    `arguments` are further ones of `dooly profile`, `model_argument` the model as
    that command takes it. It runs in a process of its own: its engine shall not
    sit in this one's memory.
    """
    if Path(db).exists() or db.startswith("builtin:"):
        try:
            return from_database(db, model, environment, filters, mode)
        except UnmeasuredError:
            if db.startswith("builtin:"):
                raise
    named = model_argument or model
    load_model(named)  # a misspelt name is told here, in one line
    command = [sys.executable, "-m", "dooly_backend.cli", "profile", named, "--db", db, *arguments]
    for stage in range(filters.get("pipeline_parallel") or 1):
        rank = ["--rank", str(stage * (filters.get("tensor_parallel") or 1))] if stage else []
        done = subprocess.run([*command, *rank], stdout=sys.stderr.fileno(), check=False)
        if done.returncode:
            message = f"`dooly profile {named}` did not end well: see above"
            raise ProfileFailed(message, done.returncode)
    return from_database(db, model, environment, filters, mode)


def model_name(text: str) -> str:
    """What a database calls the model that `text` means; `text` itself for one not known here."""
    try:
        return load_model(text).name
    except InputError:
        if Path(text).exists():
            raise
        return text
