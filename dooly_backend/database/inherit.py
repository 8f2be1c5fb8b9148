"""Measurements that one environment takes over from another, marked with where they are from."""

from __future__ import annotations

from collections.abc import Collection

from dooly_backend.database import rows
from dooly_backend.database.records import Signature
from dooly_backend.database.store import Database


def inherit(
    database: Database,
    signature: Signature,
    source: int,
    environment_id: int,
    keys: Collection[str],
) -> int:
    """Copy those of the points `keys` that are not settled here; how many they were.

    All in one transaction. Raw samples and the time of measuring are the
    source's; what was itself taken over keeps its first source.
    """
    with database.writing() as connection:
        found = connection.execute(
            "SELECT m.*, i.source_id FROM measurement AS m"
            " JOIN workload_point AS p ON p.id = m.point_id"
            " LEFT JOIN inherited AS i USING (signature, environment_id, point_id)"
            " WHERE m.signature = ? AND m.environment_id = ?"
            f" AND p.key IN ({', '.join('?' * len(keys))}) AND NOT EXISTS ("
            "  SELECT 1 FROM measurement AS own WHERE own.signature = m.signature"
            "  AND own.point_id = m.point_id AND own.environment_id = ?) AND NOT EXISTS ("
            "  SELECT 1 FROM skipped_point AS own WHERE own.signature = m.signature"
            "  AND own.point_id = m.point_id AND own.environment_id = ?) ORDER BY m.id",
            (signature.hash, source, *keys, environment_id, environment_id),
        ).fetchall()
        for row in found:
            columns = dict(row) | {"environment_id": environment_id}
            first_source = columns.pop("source_id") or source
            columns.pop("id")
            connection.execute(rows.insertion("measurement", columns), columns)
            mark = {name: columns[name] for name in ("signature", "environment_id", "point_id")}
            mark |= {"source_id": first_source, "inherited_at": rows.now()}
            connection.execute(rows.insertion("inherited", mark), mark)
    return len(found)


def inherited(database: Database, environment_id: int) -> dict[tuple[str, str], int]:
    """By signature and point: the environment that a measurement was taken over from."""
    with database.reading() as connection:
        found = connection.execute(
            "SELECT i.signature, p.key, i.source_id FROM inherited AS i"
            " JOIN workload_point AS p ON p.id = i.point_id WHERE i.environment_id = ?",
            (environment_id,),
        )
        return {(row["signature"], row["key"]): row["source_id"] for row in found}
