"""Versions of the latency database, as small functions that lead from one to the next.

Each function is recorded in the table `_sqlite_migrations` once it has run, the
way sqlite-utils does it; `PRAGMA user_version` repeats their number so that a
file's header tells its version. All pending functions run in one transaction.
"""

from __future__ import annotations

import sqlite3

import sqlite_utils
from sqlite_utils.migrations import Migrations

from dooly_backend.database.planned_sizes import forget_planned_sizes
from dooly_backend.database.schema import VERSION_1
from dooly_backend.database.schema_changes import (
    ATTENTION_WHOLE,
    CLOCK_STEPS,
    COLLECTIVES,
    GRAPH_OF_EACH_ENVIRONMENT,
    INHERITED,
    KV_CAPACITY,
    LONE_STEPS,
    RUN_CONDITIONS,
    STREAM_STEPS,
    TIMING,
    WORKERS,
)

APPLICATION_ID = int.from_bytes(b"dool", "big")
"""`PRAGMA application_id` of every latency database."""

MIGRATIONS = Migrations("dooly")

# As sqlite-utils would create it, but with its meaning.
_MIGRATIONS_TABLE = """\
CREATE TABLE IF NOT EXISTS _sqlite_migrations (
    -- Changes of the schema that this file has been through.
    id            INTEGER PRIMARY KEY,
    migration_set TEXT NOT NULL,  -- 'dooly'
    name          TEXT NOT NULL,  -- the function in dooly_backend/database/migrations.py
    applied_at    TEXT NOT NULL,  -- UTC, ISO 8601
    UNIQUE (migration_set, name)
)"""


@MIGRATIONS()
def m001_latency_tables(db: sqlite_utils.Database) -> None:
    """Environments, configurations, signatures, measurements, step costs and their views."""
    for statement in VERSION_1:
        db.execute(statement)


@MIGRATIONS()
def m002_graph_of_each_environment(db: sqlite_utils.Database) -> None:
    """Occurrences belong to an environment: kernels, and so signatures, differ between two."""
    for statement in GRAPH_OF_EACH_ENVIRONMENT:
        db.execute(statement)


@MIGRATIONS()
def m003_workers(db: sqlite_utils.Database) -> None:
    """Processes that share a profile, and what each of them has claimed."""
    for statement in WORKERS:
        db.execute(statement)


@MIGRATIONS()
def m004_kv_capacity(db: sqlite_utils.Database) -> None:
    """What decides how many KV blocks a configuration has."""
    for statement in KV_CAPACITY:
        db.execute(statement)


@MIGRATIONS()
def m005_run_conditions(db: sqlite_utils.Database) -> None:
    """What the device and the host were like during a run."""
    for statement in RUN_CONDITIONS:
        db.execute(statement)


@MIGRATIONS()
def m006_collectives(db: sqlite_utils.Database) -> None:
    """Measured collectives by bytes; they are signatures like any other."""
    for statement in COLLECTIVES:
        db.execute(statement)


@MIGRATIONS()
def m007_inherited(db: sqlite_utils.Database) -> None:
    """Measurements that an environment takes over from another one."""
    for statement in INHERITED:
        db.execute(statement)


@MIGRATIONS()
def m008_stream_steps(db: sqlite_utils.Database) -> None:
    """Steps as the engine runs them by default, and what they cost beyond their operations."""
    for statement in STREAM_STEPS:
        db.execute(statement)


@MIGRATIONS()
def m009_clock(db: sqlite_utils.Database) -> None:
    """How a device's clock gives way under load."""
    for statement in CLOCK_STEPS:
        db.execute(statement)


@MIGRATIONS()
def m010_timing(db: sqlite_utils.Database) -> None:
    """What measurements cost."""
    for statement in TIMING:
        db.execute(statement)


@MIGRATIONS()
def m011_lone_steps(db: sqlite_utils.Database) -> None:
    """What steps take that are waited for, and what of it comes before the device begins."""
    for statement in LONE_STEPS:
        db.execute(statement)


@MIGRATIONS()
def m012_planned_sizes(db: sqlite_utils.Database) -> None:
    """Signatures without the numbers of blocks that the traced step had."""
    forget_planned_sizes(db)


@MIGRATIONS()
def m013_attention_whole(db: sqlite_utils.Database) -> None:
    """What whole steps take, fitted with attention as it is."""
    for statement in ATTENTION_WHOLE:
        db.execute(statement)


@MIGRATIONS()
def m014_planned_sizes_again(db: sqlite_utils.Database) -> None:
    """The same as m012: steps that were divided into as many blocks had kept the number."""
    forget_planned_sizes(db)


def latest_version() -> int:
    """The version that this program reads and writes."""
    with sqlite_utils.Database(memory=True, execute_plugins=False) as blank:
        return len(MIGRATIONS.pending(blank))


def version_of(connection: sqlite3.Connection) -> int:
    """The version of an open database; 0 before the first migration."""
    return connection.execute("PRAGMA user_version").fetchone()[0]


def migrate(connection: sqlite3.Connection) -> None:
    """Bring an open database to the latest version, all of it or nothing.

    Safe beside other processes that do the same: what is pending is decided
    under the write lock. Raises sqlite3.Error.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        if version_of(connection) < latest_version():
            connection.execute(_MIGRATIONS_TABLE)
            MIGRATIONS.apply(sqlite_utils.Database(connection, execute_plugins=False))
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {latest_version()}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
