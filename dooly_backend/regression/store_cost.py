"""Fitting what steps in a row cost to all that a database measured, and keeping it there."""

from __future__ import annotations

from dooly_backend.database import Database
from dooly_backend.database.records import PartCost
from dooly_backend.regression.bundle_fit import fit_bundle


def store_stream_cost(database: Database, ids: tuple[int, int]) -> tuple[PartCost, ...]:
    """Fit what the steps in a row took beyond the operations, and store it.

    `ids` are the row ids of configuration and environment. Empty where no steps
    were measured. Raises UnmeasuredError where operations are missing.
    """
    if not database.stream_steps(*ids):
        return ()
    configuration = database.configurations()[ids[0]].digest
    bundle = fit_bundle(database, [configuration], database.environments()[ids[1]].digest)
    costs = bundle.configurations[0].stream_cost
    database.set_stream_cost(*ids, costs)
    return costs
