"""A database's contents without its row ids: what two files have in common.

Row ids depend on who came first. Here a row refers to another by what
identifies it everywhere (a digest, a hash, a point's key), so that contents of
two files can be compared, digested and united.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dooly_backend.database.records import canonical_json, digest

Row = dict[str, Any]
Contents = dict[str, list[Row]]

#: Tables that are referred to by row id, and the column that identifies a row everywhere.
IDENTITY = {"environment": "digest", "configuration": "digest", "workload_point": "key"}
#: Text that is JSON with keys in any order.
_JSON_COLUMNS = ("facts", "hf_config")


@dataclass(frozen=True)
class Table:
    """A table of content: what identifies a row, and which columns hold whose row ids."""

    name: str
    key: tuple[str, ...]
    references: Mapping[str, str] = field(default_factory=dict)


_PLACE = {"configuration_id": "configuration", "environment_id": "environment"}
_POINT = {**_PLACE, "point_id": "workload_point"}
_POINT_KEY = ("signature", "environment_id", "point_id")

#: Everything that a profile leaves behind, parents first.
TABLES = (
    Table("environment", ("digest",)),
    Table("configuration", ("digest",)),
    Table("signature", ("hash",)),
    Table("workload_point", ("key",)),
    Table("occurrence", ("configuration_id", "environment_id", "position"), _PLACE),
    Table("measurement", _POINT_KEY, _POINT),
    Table("inherited", _POINT_KEY, _POINT | {"source_id": "environment"}),
    Table("measurement_cost", _POINT_KEY, _POINT),
    Table("skipped_point", _POINT_KEY, _POINT),
    Table(
        "step_measurement", ("configuration_id", "environment_id", "batch", "num_layers"), _PLACE
    ),
    Table("step_cost", ("configuration_id", "environment_id"), _PLACE),
    Table("stream_step", ("configuration_id", "environment_id", "batch", "num_layers"), _PLACE),
    Table("host_step", ("configuration_id", "environment_id", "num_reqs"), _PLACE),
    Table("stream_cost", ("configuration_id", "environment_id", "mode", "part"), _PLACE),
    Table("clock_row", ("configuration_id", "environment_id", "num_layers", "pattern"), _PLACE),
    Table("run_conditions", ("configuration_id", "environment_id", "started_at"), _PLACE),
    Table("kv_capacity", ("configuration_id", "environment_id"), _PLACE),
)
BY_NAME = {table.name: table for table in TABLES}


def contents(connection: sqlite3.Connection) -> Contents:
    """Every row of every table, without row ids. Raises sqlite3.Error, ValueError for no JSON."""
    identities = {
        parent: dict(map(tuple, connection.execute(f"SELECT id, {column} FROM {parent}")))
        for parent, column in IDENTITY.items()
    }
    return {
        table.name: [
            _without_ids(dict(row), table, identities)
            for row in connection.execute(f"SELECT * FROM {table.name}")
        ]
        for table in TABLES
    }


def _without_ids(row: Row, table: Table, identities: Mapping[str, Mapping[int, str]]) -> Row:
    row.pop("id", None)
    for column, parent in table.references.items():
        if row.get(column) is not None:
            row[column] = identities[parent][row[column]]
    for column in _JSON_COLUMNS:
        if column in row:
            row[column] = canonical_json(json.loads(row[column]))
    return row


def content_digest(found: Contents) -> str:
    """SHA-256 of the contents: equal for files that hold the same, in whatever order."""
    return digest(
        {
            name: sorted(json.dumps(row, sort_keys=True) for row in rows)
            for name, rows in found.items()
        }
    )
