"""Measured collectives by topology, degree and bytes.

The view `collective` tells the same to SQLite's shell and to Datasette. It takes
JSON apart, which some builds of SQLite refuse to do in the schema of a file that
is not trusted, as every file is here: so this reads the signatures itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from dooly_backend.database import rows
from dooly_backend.database.records import Measurement
from dooly_backend.database.session import Session

#: How the names of their signatures begin.
PREFIX = "dooly::"


@dataclass(frozen=True)
class MeasuredCollective:
    """One collective of one size: `bytes` is what one rank puts in."""

    environment_id: int
    operation: str  # "all_reduce"
    backend: str  # "gloo", "nccl"
    topology: str  # nodes and ranks on each: "1x2"
    degree: int
    dtype: str
    bytes: int
    measurement: Measurement


def measured_collectives(database: Session) -> list[MeasuredCollective]:
    """All of them, by operation, degree and size. Raises DatabaseError."""
    with database.reading() as connection:
        found = connection.execute(
            "SELECT m.environment_id, m.samples_us, m.unstable, p.key, s.canonical"
            " FROM measurement AS m JOIN signature AS s ON s.hash = m.signature"
            " JOIN workload_point AS p ON p.id = m.point_id WHERE substr(s.name, 1, ?) = ?",
            (len(PREFIX), PREFIX),
        ).fetchall()
        measured = [
            _collective(
                json.loads(row["canonical"]), row["environment_id"], rows.measurement_of(row)
            )
            for row in found
        ]
    return sorted(measured, key=lambda m: (m.operation, m.degree, m.dtype, m.bytes))


def _collective(facts: dict, environment_id: int, measurement: Measurement) -> MeasuredCollective:
    point = measurement.point
    elements = facts["elements"] * (point.num_tokens or point.num_reqs or 1)
    return MeasuredCollective(
        environment_id,
        facts["collective"],
        facts["backend"],
        facts["topology"],
        facts["degree"],
        facts["dtype"],
        elements * facts["element_bytes"],
        measurement,
    )
