"""Where a simulation's step times come from: a bundle, or a database that is fitted now."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dooly_backend.config import load_model
from dooly_backend.database import Database
from dooly_backend.database.records import Configuration, Environment
from dooly_backend.errors import DoolyError, InputError
from dooly_backend.regression.bundle import BundleConfiguration, fit_bundle, load_bundle
from dooly_backend.regression.select import UnmeasuredError, select
from dooly_backend.simulation.execution import OF_CONFIGURATION, Execution, capture_sizes
from dooly_backend.simulation.limits import serving_limits
from dooly_backend.simulation.records import ServingLimits
from dooly_backend.simulation.step_time import StepModel


class ProfileFailed(DoolyError):
    """Profiling what was missing failed, with the exit code that it had."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Source:
    """A configuration that was profiled, and the times of its steps."""

    environment: Environment
    fitted: BundleConfiguration

    @property
    def configuration(self) -> Configuration:
        return self.fitted.configuration

    def limits(self, given: Mapping[str, Any]) -> ServingLimits:
        """What is given, and vLLM's defaults for the rest (`limits.serving_limits`)."""
        capacity = self.fitted.kv_capacity
        return serving_limits(self.configuration, self.environment, given, capacity)

    def timer(self, limits: ServingLimits, execution_mode: str | None = None) -> StepModel:
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
        return StepModel.of(self.fitted, Execution(graphs, sizes, limits.max_num_seqs))

    def timer_of(self, served: Mapping[str, Any], limits: ServingLimits) -> StepModel:
        """The step times of a live server that describes itself as `served` (`Run.about`)."""
        return StepModel.of(self.fitted, Execution.served(served, limits.max_num_seqs))

    def about(self) -> dict[str, Any]:
        """What was profiled where, for a summary."""
        return {
            "model": self.configuration.model,
            "backend": self.configuration.backend,
            "dtype": self.configuration.dtype,
            "kv_cache_dtype": self.configuration.kv_cache_dtype,
            "quantization": self.configuration.quantization,
            "tensor_parallel": self.configuration.tensor_parallel,
            "execution_mode": self.configuration.execution_mode,
            "engine": f"{self.environment.engine} {self.environment.engine_version}",
            "device": self.environment.device,
        }


def from_bundle(path: Path, model: str | None, filters: Mapping[str, Any]) -> Source:
    """Of a bundle, from whomever it comes. Raises InputError where it lacks the model."""
    bundle = load_bundle(path)
    return Source(bundle.environment, bundle.configuration(model, **filters))


def from_database(
    db: str, model: str, environment: str | None, filters: Mapping[str, Any]
) -> Source:
    """Of what the database measured, fitted now.

    Raises UnmeasuredError where the database does not know the model, InputError
    where several configurations or environments fit.
    """
    with Database.open(db, read_only=True) as database:
        configuration_id, environment_id = select(database, model, environment, filters)
        configuration = database.configurations()[configuration_id]
        place = database.environments()[environment_id]
        bundle = fit_bundle(database, [configuration.digest], place.digest)
    return Source(bundle.environment, bundle.configurations[0])


def profiled(
    db: str,
    model: str,
    environment: str | None,
    filters: Mapping[str, Any],
    arguments: Sequence[str],
    model_argument: str | None = None,
) -> Source:
    """As `from_database`; what is missing is profiled into it first.

    `arguments` are further ones of `dooly profile`, `model_argument` the model as
    that command takes it. It runs in a process of its own: its engine shall not
    sit in this one's memory.
    """
    if Path(db).exists() or db.startswith("builtin:"):
        try:
            return from_database(db, model, environment, filters)
        except UnmeasuredError:
            if db.startswith("builtin:"):
                raise
    named = model_argument or model
    load_model(named)  # a misspelt name is told here, in one line
    command = [sys.executable, "-m", "dooly_backend.cli", "profile", named, "--db", db, *arguments]
    done = subprocess.run(command, stdout=sys.stderr.fileno(), check=False)
    if done.returncode:
        raise ProfileFailed(f"`dooly profile {named}` did not end well: see above", done.returncode)
    return from_database(db, model, environment, filters)


def model_name(text: str) -> str:
    """What a database calls the model that `text` means; `text` itself for one not known here."""
    try:
        return load_model(text).name
    except InputError:
        if Path(text).exists():
            raise
        return text
