"""The times in an export's files, whatever the format: what `dooly-export --check` compares.

A table is a CSV file (or one packed by xz) whose columns are known by name:
``time_stats.OP.median`` (Vidur), ``median_us`` (Revati) or ``time_us``
(LLMServingSim); what is no time is the row's key. A replay table (JSON) holds
seconds by step. Other files hold no times that can be told apart.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dooly_backend.errors import InputError
from dooly_backend.exporters import Manifest, read_manifest

#: Columns that tell no two rows apart: an index, copies of a row, what a time rests on.
_IGNORED = {"", "copy", "source"}
_MEDIAN = re.compile(r"time_stats\.(.+)\.median")
_TIMES = re.compile(r"time_stats\..*|(min|mean|median|max|std|time)_us")
_DEGREE = re.compile(r"tp\d+")

Key = tuple[str, ...]


@dataclass(frozen=True)
class Time:
    """A time in the table's own unit; `std` is the spread beside it, None where there is none."""

    value: float
    std: float | None = None


@dataclass(frozen=True)
class ExportTables:
    """An export as `read_export` reads it. `opaque` names files whose times cannot be read."""

    manifest: Manifest
    times: dict[str, dict[Key, Time]] = field(default_factory=dict)  # by operation
    opaque: dict[str, str] = field(default_factory=dict)  # SHA-256 by name


def read_export(folder: Path) -> ExportTables:
    """Every time in the export at `folder`.

    Raises InputError where it is no export, or a table cannot be read.
    """
    manifest = read_manifest(folder)
    tables = ExportTables(manifest)
    for name, digest in sorted(manifest.get("files", {}).items()):
        path = folder / name
        try:
            if name.endswith((".csv", ".csv.xz")):
                found = _csv_times(name, _rows(path))
            elif path.name == "replay_table.json":
                found = _replay_times(name, path)
            else:
                if path.suffix == ".pkl":  # loading it would run code
                    tables.opaque[name] = str(digest)
                continue
            for operation, key, time in found:
                tables.times.setdefault(operation, {}).setdefault(key, time)
        except (OSError, ValueError, lzma.LZMAError, csv.Error) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{path} cannot be read as a table: {reason}") from error
    return tables


def _rows(path: Path) -> Iterator[dict[str, str]]:
    data = path.read_bytes()
    if path.suffix == ".xz":
        data = lzma.decompress(data)
    return csv.DictReader(io.StringIO(data.decode("utf-8")))


def _csv_times(name: str, rows: Iterator[dict[str, str]]) -> Iterator[tuple[str, Key, Time]]:
    parts = name.split("/")
    degree = next((part for part in parts if _DEGREE.fullmatch(part)), "")
    stem = parts[-1].removesuffix(".xz").removesuffix(".csv")
    for row in rows:
        if row.get("copy", "0") != "0":
            continue
        keys = {k: v for k, v in row.items() if k not in _IGNORED and not _TIMES.fullmatch(k)}
        layer = keys.pop("layer", None)
        key = (stem, *(f"{column}={value}" for column, value in keys.items()))
        for operation, value, std in _times_of(row, layer or stem):
            yield f"{degree} {operation}".strip(), key, Time(value, std)


def _times_of(row: dict[str, str], name: str) -> Iterator[tuple[str, float, float | None]]:
    """Each time of a row: the operation, the median, the spread."""
    for column in ("median_us", "time_us"):
        if column in row:
            yield name, float(row[column]), float(row["std_us"]) if "std_us" in row else None
            return
    for column, value in row.items():
        if match := _MEDIAN.fullmatch(column):
            std = row.get(f"time_stats.{match[1]}.std")
            # A row of attention.csv is of one phase: the other's columns hold nothing.
            other = "attn_decode" if int(row.get("prefill_chunk_size") or 0) else "attn_prefill"
            if "prefill_chunk_size" not in row or match[1] != other:
                yield match[1], float(value), float(std) if std else None


def _replay_times(name: str, path: Path) -> Iterator[tuple[str, Key, Time]]:
    table = json.loads(path.read_text("utf-8"))
    if not isinstance(table, dict):
        raise ValueError("it is no JSON object")
    for step, seconds in table.items():
        yield f"{name.split('/')[0]} step", (step,), Time(float(seconds))
