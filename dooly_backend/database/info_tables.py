"""What `dooly db info` shows of a database: tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dooly_backend.database.info import DatabaseInfo
from dooly_backend.database.records import Configuration, PartCost

_NOTHING = 1e-3
_HASH_SHOWN = 12  # hex digits: enough to tell signatures apart, and to select one


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


#: Parts of a run, in order: starting the engine, tracing, finding what runs alone, capturing
#: steps, taking samples, all else.
_PARTS = ("boot", "trace", "resolve", "setup", "timing", "rest")


def _run_table(info: DatabaseInfo) -> Table:
    """A row for each run; ranges are smallest, median and largest."""
    shown = [(key, head) for key, head in _RANGES if any(key in r.run.facts for r in info.runs)]
    is_slowed = any(r.run.facts.get("throttled") for r in info.runs)
    has_seconds = any(r.run.facts.get("spent_s") for r in info.runs)
    table = _table(
        "\nRuns (of clock, temperature and load: smallest, median, largest)",
        "began, UTC", "configuration", "environment", "steps",
        *([f"seconds: {' / '.join(_PARTS)}"] if has_seconds else []), *(head for _, head in shown),
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
            *([_seconds(facts)] if has_seconds else []),
            *(" / ".join(f"{value:g}" for value in facts.get(key, ())) or "-" for key, _ in shown),
            *([_slowed(facts)] if is_slowed else []),
        )
    return table


def _seconds(facts: Mapping[str, Any]) -> str:
    """What the parts of a run took; "-" for what nobody looked at."""
    seconds = facts.get("spent_s") or {}
    return " / ".join(f"{seconds[part]:.1f}" if part in seconds else "-" for part in _PARTS)


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
    """``120 + 22.4 a layer``, ``attention + 0.93 of the rest``."""
    share = f"attention + {cost.share:.3f} of the rest"
    terms = [
        (cost.share, share),
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
