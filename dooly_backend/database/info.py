"""What a latency database holds: `dooly db info`."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from dooly_backend.database import migrations, rows
from dooly_backend.database.records import Configuration, Environment, PartCost, RunConditions


@dataclass(frozen=True)
class EnvironmentInfo:
    """An environment and how much was measured in it."""

    id: int
    environment: Environment
    digest: str
    measurements: int


@dataclass(frozen=True)
class Coverage:
    """How many of a configuration's signatures an environment has measured."""

    environment_id: int
    device: str
    signatures: int
    measured: int
    complete: bool  # every signature has at least one measurement


@dataclass(frozen=True)
class ConfigurationInfo:
    """A configuration, the size of its call graph, and where it was measured."""

    id: int
    configuration: Configuration
    digest: str
    occurrences: int
    signatures: int
    coverage: tuple[Coverage, ...]


@dataclass(frozen=True)
class SignatureCount:
    """How many signatures there are of one granularity and kind."""

    granularity: str
    kind: str
    count: int


@dataclass(frozen=True)
class SkippedInfo:
    """A point that could not be measured, and why."""

    signature: str
    name: str
    environment_id: int
    point: str
    reason: str


@dataclass(frozen=True)
class SharedSignature:
    """A signature that several configurations run, measured once for all of them."""

    signature: str
    name: str
    configuration_ids: tuple[int, ...]


@dataclass(frozen=True)
class RunInfo:
    """A run that measured, and how device and host were meanwhile (`profiling/watch.py`)."""

    configuration_id: int
    environment_id: int
    run: RunConditions


@dataclass(frozen=True)
class StreamInfo:
    """Whole steps of a configuration in an environment, and what was fitted to them."""

    configuration_id: int
    environment_id: int
    steps: int  # measured, at all depths
    depths: tuple[int, ...]  # layers
    costs: tuple[PartCost, ...]


@dataclass(frozen=True)
class DatabaseInfo:
    """The contents of a latency database; rich prints it, `dataclasses.asdict` is its JSON."""

    path: str
    schema_version: int
    size_bytes: int  # with its write-ahead log
    environments: tuple[EnvironmentInfo, ...]
    configurations: tuple[ConfigurationInfo, ...]
    runs: tuple[RunInfo, ...]  # oldest first
    signatures: tuple[SignatureCount, ...]
    measurements: int
    unstable: int  # measurements whose spread stayed too large
    skipped: tuple[SkippedInfo, ...]
    shared: tuple[SharedSignature, ...]
    stream: tuple[StreamInfo, ...] = ()  # steps as the engine runs them by default


def collect(connection: sqlite3.Connection, path: Path) -> DatabaseInfo:
    """Read everything in the transaction that is open. Raises sqlite3.Error."""
    measurements, unstable = connection.execute(
        "SELECT count(*), coalesce(sum(unstable), 0) FROM measurement"
    ).fetchone()
    return DatabaseInfo(
        path=str(path),
        schema_version=migrations.version_of(connection),
        size_bytes=_size(path),
        environments=_environments(connection),
        configurations=_configurations(connection),
        runs=_runs(connection),
        signatures=_signature_counts(connection),
        measurements=measurements,
        unstable=unstable,
        skipped=_skipped(connection),
        shared=_shared(connection),
        stream=_stream(connection),
    )


def coverage(connection: sqlite3.Connection) -> dict[int, list[Coverage]]:
    """Where each configuration was measured, by its row id. Raises sqlite3.Error."""
    covered: dict[int, list[Coverage]] = {}
    for row in connection.execute("SELECT * FROM configuration_coverage ORDER BY environment_id"):
        covered.setdefault(row["configuration_id"], []).append(
            Coverage(
                row["environment_id"],
                row["device"],
                row["signatures"],
                row["measured"],
                bool(row["complete"]),
            )
        )
    return covered


def _size(path: Path) -> int:
    files = (path, path.with_name(path.name + "-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def _environments(connection: sqlite3.Connection) -> tuple[EnvironmentInfo, ...]:
    found = connection.execute(
        "SELECT e.*, (SELECT count(*) FROM measurement AS m WHERE m.environment_id = e.id)"
        " AS measurements FROM environment AS e ORDER BY e.id"
    )
    return tuple(
        EnvironmentInfo(row["id"], rows.environment_of(row), row["digest"], row["measurements"])
        for row in found
    )


def _configurations(connection: sqlite3.Connection) -> tuple[ConfigurationInfo, ...]:
    covered = coverage(connection)
    found = connection.execute(
        # Of several environments' graphs the longest; they are rarely of different lengths.
        "SELECT c.*, ifnull(max(o.position) + 1, 0) AS occurrences,"
        " count(DISTINCT o.signature) AS signatures"
        " FROM configuration AS c LEFT JOIN occurrence AS o ON o.configuration_id = c.id"
        " GROUP BY c.id ORDER BY c.id"
    )
    return tuple(
        ConfigurationInfo(
            row["id"],
            rows.configuration_of(row),
            row["digest"],
            row["occurrences"],
            row["signatures"],
            tuple(covered.get(row["id"], ())),
        )
        for row in found
    )


def _runs(connection: sqlite3.Connection) -> tuple[RunInfo, ...]:
    found = connection.execute(
        "SELECT * FROM run_conditions ORDER BY started_at, configuration_id, environment_id"
    )
    return tuple(
        RunInfo(row["configuration_id"], row["environment_id"], rows.run_of(row)) for row in found
    )


def _signature_counts(connection: sqlite3.Connection) -> tuple[SignatureCount, ...]:
    found = connection.execute(
        "SELECT granularity, kind, count(*) AS n FROM signature"
        " GROUP BY granularity, kind ORDER BY granularity, kind"
    )
    return tuple(SignatureCount(row["granularity"], row["kind"], row["n"]) for row in found)


def _skipped(connection: sqlite3.Connection) -> tuple[SkippedInfo, ...]:
    found = connection.execute(
        "SELECT k.signature, s.name, k.environment_id, p.key, k.reason FROM skipped_point AS k"
        " JOIN signature AS s ON s.hash = k.signature JOIN workload_point AS p ON p.id = k.point_id"
        " ORDER BY s.name, k.signature, k.environment_id, p.num_tokens, p.id"
    )
    return tuple(SkippedInfo(*row) for row in found)


def _shared(connection: sqlite3.Connection) -> tuple[SharedSignature, ...]:
    found = connection.execute(
        "SELECT signature, name, configuration_ids FROM shared_signature ORDER BY name, signature"
    )
    return tuple(
        SharedSignature(
            row["signature"],
            row["name"],
            tuple(sorted(int(text) for text in row["configuration_ids"].split(","))),
        )
        for row in found
    )


def _stream(connection: sqlite3.Connection) -> tuple[StreamInfo, ...]:
    costs: dict[tuple[int, int], list[PartCost]] = {}
    for row in connection.execute("SELECT * FROM stream_cost ORDER BY mode, part"):
        place = row["configuration_id"], row["environment_id"]
        costs.setdefault(place, []).append(rows.part_cost_of(row))
    found = connection.execute(
        "SELECT configuration_id, environment_id, count(*) AS steps,"
        " group_concat(DISTINCT num_layers) AS depths"
        " FROM stream_step GROUP BY configuration_id, environment_id"
    )
    items = []
    for row in found:
        place = row["configuration_id"], row["environment_id"]
        depths = sorted(map(int, row["depths"].split(",")))
        items.append(StreamInfo(*place, row["steps"], tuple(depths), tuple(costs.get(place, ()))))
    return tuple(items)
