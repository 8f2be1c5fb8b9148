"""What a latency database holds: `dooly db info`."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dooly_backend.database import migrations, rows
from dooly_backend.database.records import Configuration, Environment, PartCost, RunConditions

_NOTHING = 1e-3
_HASH_SHOWN = 12  # hex digits: enough to tell signatures apart, and to select one


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

    def __rich__(self) -> RenderableType:
        return render(self)


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


def render(info: DatabaseInfo) -> RenderableType:
    """Tables for a terminal."""
    parts: list[RenderableType] = [
        Text(
            f"{info.path}: schema version {info.schema_version}, "
            f"{info.size_bytes / 2**20:.1f} MiB, {info.measurements} measurements "
            f"({info.unstable} unstable), {len(info.skipped)} points skipped"
        ),
        _environment_table(info),
        _configuration_table(info),
        _signature_table(info),
    ]
    if info.runs:
        parts.append(_run_table(info))
    if info.stream:
        parts.append(_stream_table(info))
    if info.skipped:
        parts.append(_skipped_table(info))
    if info.shared:
        parts.append(_shared_table(info))
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        numeric = column in ("measurements", "occurrences", "signatures", "points")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    return table


def _environment_table(info: DatabaseInfo) -> Table:
    table = _table("\nEnvironments", "id", "digest", "device", "engine", "measurements")
    for item in info.environments:
        environment = item.environment
        table.add_row(
            str(item.id),
            item.digest[:_HASH_SHOWN],
            Text(environment.device),
            Text(f"{environment.engine} {environment.engine_version}"),
            str(item.measurements),
        )
    return table


def _precision(configuration: Configuration) -> str:
    """What is not in the model's own number format."""
    parts = []
    if configuration.quantization != "none":
        parts.append(f" weights {configuration.quantization}")
    if configuration.kv_cache_dtype != "auto":
        parts.append(f" KV cache {configuration.kv_cache_dtype}")
    return "".join(parts)


def _configuration_table(info: DatabaseInfo) -> Table:
    table = _table(
        "\nConfigurations", "id", "model", "served as", "occurrences", "signatures", "measured on"
    )
    for item in info.configurations:
        configuration = item.configuration
        served = (
            f"{configuration.engine} {configuration.backend} {configuration.dtype} "
            f"tp{configuration.tensor_parallel} pp{configuration.pipeline_parallel} "
            f"{configuration.execution_mode}{_precision(configuration)}"
        )
        places = [
            f"{place.device}: "
            + ("complete" if place.complete else f"{place.measured} of {place.signatures}")
            for place in item.coverage
        ]
        table.add_row(
            str(item.id),
            Text(configuration.model),
            Text(served),
            str(item.occurrences),
            str(item.signatures),
            Text("\n".join(places) or "nowhere yet"),
        )
    return table


#: What of a run's conditions is shown, and its column; the rest lies in the JSON.
_RANGES = (
    ("clock_mhz", "clock, MHz"),
    ("temperature_c", "temperature, C"),
    ("others_busy_processors", "others' processors"),
)


def _run_table(info: DatabaseInfo) -> Table:
    """A row for each run; ranges are smallest, median and largest."""
    shown = [(key, head) for key, head in _RANGES if any(key in r.run.facts for r in info.runs)]
    is_slowed = any(r.run.facts.get("throttled") for r in info.runs)
    table = _table(
        "\nRuns (of clock, temperature and load: smallest, median, largest)",
        "began, UTC", "configuration", "environment", "steps", *(head for _, head in shown),
        *(["slowed down by"] if is_slowed else []),
    )  # fmt: skip
    for item in info.runs:
        facts = item.run.facts
        steps = str(facts.get("captured_steps", ""))
        if facts.get("suspicious"):
            steps += f", {facts['suspicious']} suspicious"
        table.add_row(
            item.run.started_at[:19].replace("T", " "),
            str(item.configuration_id),
            str(item.environment_id),
            steps,
            *(" / ".join(f"{value:g}" for value in facts.get(key, ())) or "-" for key, _ in shown),
            *([_slowed(facts)] if is_slowed else []),
        )
    return table


def _slowed(facts: Mapping[str, Any]) -> Text:
    """The driver's reasons for a lower clock, and in how many captured steps each was seen."""
    reasons = facts.get("throttled") or {}
    return Text(", ".join(f"{reason} ({steps})" for reason, steps in reasons.items()) or "-")


def _signature_table(info: DatabaseInfo) -> Table:
    table = _table("\nSignatures", "granularity", "depends on", "signatures")
    for item in info.signatures:
        table.add_row(item.granularity, item.kind, str(item.count))
    return table


def _stream_table(info: DatabaseInfo) -> Table:
    table = _table(
        "\nSteps in a row, and what is fitted to them (microseconds; error: left out in turn)",
        "configuration", "environment", "measured", "part", "takes", "error",
    )  # fmt: skip
    for item in info.stream:
        depths = ", ".join(map(str, item.depths))
        about = (str(item.configuration_id), str(item.environment_id))
        measured = f"{item.steps} steps of {depths} layers"
        for cost in item.costs or (None,):
            fitted = ("", "not fitted", "")
            if cost is not None:
                error = f"{cost.mape:.1f} %, at most {cost.worst:.1f} %"
                fitted = (f"{cost.mode} {cost.part}", formula(cost), error)
            table.add_row(*about, measured, *map(Text, fitted))
            about, measured = ("", ""), ""
    return table


def formula(cost: PartCost) -> str:
    """``0.93 operations + 120 + 22.4 a layer``."""
    terms = [
        (cost.share, f"{cost.share:.3f} operations"),
        (cost.step_us, f"{cost.step_us:.0f}"),
        (cost.layer_us, f"{cost.layer_us:.1f} a layer"),
        (cost.request_us, f"{cost.request_us:.2f} a request"),
        (cost.token_us, f"{cost.token_us:.3f} a token"),
    ]
    return " + ".join(text for value, text in terms if value > _NOTHING) or "0"


def _skipped_table(info: DatabaseInfo) -> Table:
    counts: dict[tuple[str, str], list[str]] = {}
    for item in info.skipped:
        counts.setdefault((item.name, item.reason), []).append(item.point)
    table = _table("\nSkipped points", "name", "reason", "points", "first")
    for (name, reason), points in counts.items():
        table.add_row(Text(name), Text(reason), str(len(points)), Text(points[0]))
    return table


def _shared_table(info: DatabaseInfo) -> Table:
    table = _table("\nShared signatures", "signature", "name", "configurations")
    for item in info.shared:
        ids = ", ".join(map(str, item.configuration_ids))
        table.add_row(item.signature[:_HASH_SHOWN], Text(item.name), ids)
    return table
