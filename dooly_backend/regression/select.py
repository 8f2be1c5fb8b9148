"""Which configuration and environment of a database is meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from dooly_backend.database import Database
from dooly_backend.database.records import Configuration, Environment
from dooly_backend.errors import InputError

Key = TypeVar("Key")

_DIGEST_SHOWN = 12
_DIGEST_SHORTEST = 6  # hex digits that select by digest

# What tells two configurations of one model apart, besides the contents of its config.
TELLING = (
    *(f.name for f in fields(Configuration) if f.name not in ("model", "hf_config", "facts")),
    "quantization",
    "expert_parallel",
    "stage",
)


_USUAL_MODE = "full_graph"  # vLLM's, unless it is told otherwise


class UnmeasuredError(InputError):
    """The database lacks what was asked for: profiling would add it."""


def select(
    database: Database,
    model: str | None,
    environment: str | None,
    filters: Mapping[str, Any],
) -> tuple[int, int]:
    """Row ids of the one configuration and environment that fit and are measured.

    Where profiles in several execution modes fit and no filter names one, the engine's
    default is meant: with graphs. Raises InputError that names the choices when none or
    several fit, and TypeError for a filter that no configuration has.
    """
    configurations = _matching_configurations(database, model, filters)
    environments = _matching_environments(database, environment)
    coverage = database.coverage()
    complete = [
        (configuration_id, place.environment_id)
        for configuration_id in configurations
        for place in coverage.get(configuration_id, ())
        if place.complete and place.environment_id in environments
    ]
    if not complete:
        raise _unmeasured(database, configurations, environments)
    chosen = set(in_usual_mode({i: configurations[i] for i, _ in complete}, filters))
    complete = [(i, environment_id) for i, environment_id in complete if i in chosen]
    if len(chosen) > 1:
        choices = tell_apart([configurations[i] for i in sorted(chosen)])
        raise InputError(
            f"database {database.path} holds {len(chosen)} configurations that fit: "
            f"{'; '.join(choices)}: say which one, with --model NAME or DIGEST, or by what differs"
        )
    if len(complete) > 1:
        choices = [_place(environments[i]) for _, i in complete]
        raise InputError(
            f"database {database.path} has measurements of {len(choices)} environments: "
            f"{'; '.join(choices)}: choose one with --environment DEVICE or its digest"
        )
    return complete[0]


def in_usual_mode(
    fitting: Mapping[Key, Configuration], filters: Mapping[str, Any]
) -> Mapping[Key, Configuration]:
    """Those in the engine's default execution mode, where there are any and no filter names one."""
    if filters.get("execution_mode") is not None:
        return fitting
    usual = {i: each for i, each in fitting.items() if each.execution_mode == _USUAL_MODE}
    return usual or fitting


def select_all(
    database: Database, models: Sequence[str] = (), environment: str | None = None
) -> tuple[list[int], int]:
    """Row ids of all configurations that are measured to the end in one environment, and its id.

    `models` are names, last parts of names, or digests; none: every model.
    Raises InputError where a model has no such configuration, or where several
    environments would do.
    """
    named = [_matching_configurations(database, model, {}) for model in models or (None,)]
    environments = _matching_environments(database, environment)
    coverage = database.coverage()
    chosen: dict[int, None] = {}  # in the database's order of each name
    places: set[int] = set()
    for configurations in named:
        complete = {
            configuration_id: [
                place.environment_id
                for place in coverage.get(configuration_id, ())
                if place.complete and place.environment_id in environments
            ]
            for configuration_id in configurations
        }
        complete = {i: found for i, found in complete.items() if found}
        if not complete:
            raise _unmeasured(database, configurations, environments)
        chosen |= dict.fromkeys(complete)
        places.update(i for found in complete.values() for i in found)
    if len(places) > 1:
        choices = "; ".join(_place(environments[i]) for i in sorted(places))
        raise InputError(
            f"database {database.path} has measurements of {len(places)} environments: "
            f"{choices}: choose one with --environment DEVICE or its digest"
        )
    return list(chosen), places.pop()


def _matching_configurations(
    database: Database, model: str | None, filters: Mapping[str, Any]
) -> dict[int, Configuration]:
    unknown = sorted(set(filters) - set(TELLING))
    if unknown:
        raise TypeError(f"configurations have no {', '.join(unknown)}: {', '.join(TELLING)}")
    stored = database.configurations()
    if not stored:
        raise UnmeasuredError(
            f"database {database.path} holds no configuration: "
            f"run `dooly profile MODEL --db {database.path}` first"
        )
    named = {i: c for i, c in stored.items() if model is None or is_called(c, model)}
    if not named:
        names = ", ".join(sorted({c.model for c in stored.values()}))
        raise UnmeasuredError(
            f"database {database.path} has no model {model!r}, only {names}: "
            f"run `dooly profile {model} --db {database.path}` first"
        )
    wanted = {name: value for name, value in filters.items() if value is not None}
    fitting = {i: c for i, c in named.items() if all(getattr(c, n) == v for n, v in wanted.items())}
    if not fitting:
        asked = ", ".join(f"{name}={value}" for name, value in wanted.items())
        choices = tell_apart(list(named.values()), always=tuple(wanted))
        raise UnmeasuredError(
            f"database {database.path} has no configuration with {asked}, only "
            f"{'; '.join(choices)}: run `{_profile_command(database, named, wanted)}` first"
        )
    return fitting


#: Options of `dooly profile` that set a field of `Configuration`.
_FLAGS = {
    "engine": "--engine",
    "backend": "--backend",
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
    "block_size": "--block-size",
    "tensor_parallel": "--tp",
    "pipeline_parallel": "--pp",
    "execution_mode": "--execution-mode",
}


def _profile_command(
    database: Database, named: Mapping[int, Configuration], wanted: Mapping[str, Any]
) -> str:
    """What measures what is asked for."""
    models = _unique(configuration.model for configuration in named.values())
    return " ".join(["dooly profile", *models, *profile_options(wanted), f"--db {database.path}"])


def profile_options(wanted: Mapping[str, Any]) -> list[str]:
    """Words of a command line that make `dooly profile` measure what these filters select."""
    asked = {n: v for n, v in wanted.items() if v is not None and n in _FLAGS}
    if asked.get("quantization") == "none":
        del asked["quantization"]
    return [word for name, value in asked.items() for word in (_FLAGS[name], str(value))]


def is_called(configuration: Configuration, name: str) -> bool:
    """By the model's name, its last part, or the configuration's digest."""
    names = {configuration.model, configuration.model.rstrip("/").rsplit("/", 1)[-1]}
    by_digest = len(name) >= _DIGEST_SHORTEST and configuration.digest.startswith(name.lower())
    return name in names or by_digest


def _matching_environments(database: Database, text: str | None) -> dict[int, Environment]:
    """By digest or by device; a device's whole name goes before a part of it."""
    stored = database.environments()
    if text is None:
        return stored
    wanted = text.casefold()
    tests = (
        lambda e: len(wanted) >= _DIGEST_SHORTEST and e.digest.startswith(wanted),
        lambda e: e.device.casefold() == wanted,
        lambda e: wanted in e.device.casefold(),
    )
    for test in tests:
        found = {i: e for i, e in stored.items() if test(e)}
        if found:
            return found
    choices = "; ".join(map(_place, stored.values())) or "none"
    raise InputError(
        f"database {database.path} has no environment {text!r}, only {choices}: "
        "choose one of these, or run `dooly profile` there"
    )


def _unmeasured(
    database: Database,
    configurations: Mapping[int, Configuration],
    environments: Mapping[int, Environment],
) -> InputError:
    """What is missing, and how to measure it."""
    coverage = database.coverage()
    parts = [
        f"{configurations[i].model} has {place.measured} of {place.signatures} signatures "
        f"measured on {_place(environments[place.environment_id])}"
        for i in configurations
        for place in coverage.get(i, ())
        if place.environment_id in environments
    ]
    names = _unique(configuration.model for configuration in configurations.values())
    state = "; ".join(parts) or f"nothing of {', '.join(names)} is measured there"
    return UnmeasuredError(
        f"database {database.path} is not complete: {state}: "
        f"run `dooly profile {' '.join(names)} --db {database.path}`"
    )


def _place(environment: Environment) -> str:
    return (
        f"{environment.device}, {environment.engine} {environment.engine_version} "
        f"({environment.digest[:_DIGEST_SHOWN]})"
    )


def tell_apart(configurations: Sequence[Configuration], always: tuple[str, ...] = ()) -> list[str]:
    """A line for each, with the fields in which they differ and the digest."""
    differing = [
        name
        for name in TELLING
        if name in always or len({getattr(c, name) for c in configurations}) > 1
    ]
    lines = []
    for c in configurations:
        values = [f"{name}={getattr(c, name)}" for name in differing]
        lines.append(" ".join([c.model, *values, f"({c.digest[:_DIGEST_SHOWN]})"]))
    return lines


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
