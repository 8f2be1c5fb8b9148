"""Making a bundle of what a database measured: regressors, what steps cost beside, the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from dooly_backend import __version__
from dooly_backend.database import Database
from dooly_backend.database.records import HostStep, Occurrence, StreamStep
from dooly_backend.regression.bundle import Bundle, BundleConfiguration
from dooly_backend.regression.clock import ClockResponse, fit_clock
from dooly_backend.regression.features import KINDS, features_of
from dooly_backend.regression.fitting import FittedSignature, fit_signatures
from dooly_backend.regression.intervals import LEVEL
from dooly_backend.regression.select import select_all
from dooly_backend.regression.step_operations import step_operations
from dooly_backend.regression.stream_cost import fit_stream_cost

_UNITS = {"time": "us", "tokens": "tokens", "errors": "|log(measured / predicted)|"}
_VERSIONS = ("numpy", "scipy", "scikit-learn", "joblib")


def fit_bundle(
    database: Database,
    models: Sequence[str] = (),
    environment: str | None = None,
    only: Sequence[str] = (),
) -> Bundle:
    """Fit all that `models` (none: every complete configuration) run in one environment.

    `only` names the regressors to choose from. Raises InputError where a model
    is not measured to the end, or several environments are.
    """
    ids, environment_id = select_all(database, models, environment)
    graphs = {i: tuple(database.occurrences(i, environment_id)) for i in ids}
    wanted = {o.signature.hash: o.signature for graph in graphs.values() for o in graph}
    measured = {s: database.measurements(hash_, environment_id) for hash_, s in wanted.items()}
    fitted = {s.hash: each for s, each in fit_signatures(measured, only).items()}
    stored = database.configurations()
    clocks = _clocks(database, graphs, environment_id)
    configurations = tuple(
        _with_stream_cost(
            BundleConfiguration(
                stored[i],
                graph,
                database.step_cost(i, environment_id),
                {o.signature.hash: fitted[o.signature.hash] for o in graph},
                database.kv_capacity(i, environment_id),
                clock=clocks[i],
            ),
            database.stream_steps(i, environment_id),
            database.host_steps(i, environment_id),
        )
        for i, graph in graphs.items()
    )
    return Bundle(
        database.environments()[environment_id], fitted, configurations, _metadata(database, fitted)
    )


def _clocks(
    database: Database, graphs: Mapping[int, Sequence[Occurrence]], environment_id: int
) -> dict[int, ClockResponse | None]:
    """How the device's clock gives way in each configuration.

    Where it was watched in another one alone, that one's is taken: all dense models'
    prefills draw what the device can. Experts, which wait for their weights, draw less.
    """
    watched = {
        i: fit_clock(steps).response
        for i in database.configurations()
        if (steps := database.clock_steps(i, environment_id))
    }
    dense = {
        i: clock
        for i, clock in watched.items()
        if not _has_experts(database.occurrences(i, environment_id))
    }
    of_any = next(iter(dense.values()), None)
    return {
        i: watched.get(i, None if _has_experts(graph) else of_any) for i, graph in graphs.items()
    }


def _has_experts(graph: Sequence[Occurrence]) -> bool:
    return any(occurrence.signature.kind == "routing" for occurrence in graph)


def _with_stream_cost(
    each: BundleConfiguration, steps: Sequence[StreamStep], hosts: Sequence[HostStep]
) -> BundleConfiguration:
    """With what steps in a row took beyond the operations as this bundle predicts them."""
    if not steps:
        return each
    operations = step_operations(each.configuration, each.occurrences, each.predictors, steps)
    return replace(each, stream_cost=fit_stream_cost(steps, operations, hosts))


def _metadata(database: Database, fitted: Mapping[str, FittedSignature]) -> dict[str, Any]:
    kinds = {each.signature.kind for each in fitted.values()}
    return {
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "database": database.path.name,
        "versions": {"dooly": __version__, **{n: metadata.version(n) for n in _VERSIONS}},
        "units": _UNITS,
        "interval": LEVEL,
        "features": {
            kind: {f.name: {"unit": f.unit, "meaning": f.meaning} for f in features_of(kind)}
            for kind in KINDS
            if kind in kinds
        },
    }
