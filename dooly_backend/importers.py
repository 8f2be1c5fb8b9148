"""Importers: what reads other profilers' tables into a latency database.

An importer is a class with the attributes of `Importer`; a package makes its
own known through the entry-point group ``dooly.importers``, those of this
project lie in ``shims/``. What is imported belongs to an environment of its
own, whose engine is the simulator, so it never mixes with measurements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from dooly_backend.config import ModelDescription
from dooly_backend.database import Database
from dooly_backend.database.records import (
    Configuration,
    Environment,
    Measurement,
    Occurrence,
    Signature,
    canonical_json,
)
from dooly_backend.plugins import Plugins

GROUP = "dooly.importers"


@dataclass(frozen=True)
class Wanted:
    """What of a folder to import; None: all of it.

    `networks` choose among several profiles of collectives. `config` gives the
    HF config of the one model that is imported, where its name is not known.
    """

    model: str | None = None
    device: str | None = None
    networks: tuple[str, ...] = ()
    config: ModelDescription | None = None

    def fits(self, model: str, device: str) -> bool:
        by_name = self.model is None or self.model in (model, model.rpartition("/")[2])
        return by_name and (self.device is None or self.device.lower() == device.lower())


@dataclass(frozen=True)
class Profile:
    """One configuration with its times, as a simulator's tables hold them.

    `notes` say what of the tables is not in it.
    """

    environment: Environment
    configuration: Configuration
    occurrences: tuple[Occurrence, ...]
    measurements: Mapping[Signature, Sequence[Measurement]]
    notes: tuple[str, ...] = ()


@runtime_checkable
class Importer(Protocol):
    """One input format."""

    name: str
    description: str

    def read(self, folder: Path, wanted: Wanted) -> list[Profile]:
        """All profiles in `folder` that are `wanted`, none read by halves.

        Raises InputError, in one line, for tables that are missing or not understood.
        """


@dataclass(frozen=True)
class Imported:
    """What `store` did: `points` are those that the database did not have."""

    profiles: tuple[Profile, ...]
    signatures: int
    points: int


_PLUGINS: Plugins[Importer] = Plugins(
    Importer,  # type: ignore[type-abstract]
    group=GROUP,
    listed_as="IMPORTERS",
    noun="importer",
    what="import format",
    parts="name, description or read",
)


def importer_names() -> list[str]:
    """Names of every importer that can be found, sorted."""
    return _PLUGINS.names()


def get_importer(name: str) -> Importer:
    """The importer of that name. Raises InputError naming the known ones."""
    return _PLUGINS.get(name)


def store(database: Database, profiles: Sequence[Profile]) -> Imported:
    """Put `profiles` into `database`; what it holds already is kept, so repeating adds nothing.

    One transaction a signature: killed at any time, the next import goes on.
    """
    points = 0
    signatures: set[str] = set()
    for profile in profiles:
        environment_id = database.add_environment(profile.environment)
        configuration_id = database.add_configuration(
            profile.configuration, profile.occurrences, environment_id
        )
        for signature, measurements in profile.measurements.items():
            signatures.add(signature.hash)
            points += database.record_all(signature, environment_id, measurements, configuration_id)
    return Imported(tuple(profiles), len(signatures), points)


# -- for importers ------------------------------------------------------------


def imported_canonical(origin: str, operation: str, facts: Mapping[str, object]) -> str:
    """A signature's canonical text. It names the origin, as no measured signature's does."""
    return canonical_json({"origin": f"imported from {origin}", "operation": operation, **facts})


def file_digests(files: Sequence[Path], root: Path) -> dict[str, str]:
    """SHA-256 of each file, by its path below `root`: the same wherever the folder lies."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }
