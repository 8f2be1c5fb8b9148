"""What moved between two exports, and by how much: `dooly-export --check`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dooly_backend.errors import InputError
from dooly_backend.export_tables import ExportTables, Key, Time

#: Times are compared relative to themselves, or to this part of the operation's
#: median where they are smaller: Vidur's decode rows cross zero.
FLOOR = 0.01
#: Standard deviations of the difference that noise may explain.
NOISE = 2.0

Verdict = Literal["equal", "within threshold", "within noise", "moved"]


@dataclass(frozen=True)
class OperationChange:
    """How the times of one operation changed, percent of the earlier ones.

    `worst` is the largest change by size, `worst_at` its row; `noise` is what
    the spread in the tables explains of a typical row, None where they have none.
    """

    operation: str
    rows: int
    added: int
    removed: int
    median: float
    worst: float
    worst_at: str
    noise: float | None
    verdict: Verdict


@dataclass(frozen=True)
class ExportChange:
    """The difference of two exports of one model in one format."""

    format: str
    model: str
    threshold: float
    operations: tuple[OperationChange, ...]
    notes: tuple[str, ...]

    @property
    def moved(self) -> list[OperationChange]:
        """Operations beyond the threshold and beyond noise, or that lost rows."""
        return [change for change in self.operations if change.verdict == "moved"]

    @property
    def ok(self) -> bool:
        return not self.moved

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "format": self.format,
            "model": self.model,
            "threshold_percent": self.threshold,
            "rows": sum(change.rows for change in self.operations),
            "rows_added": sum(change.added for change in self.operations),
            "rows_removed": sum(change.removed for change in self.operations),
            "moved": [change.operation for change in self.moved],
            "operations": [
                {
                    "operation": change.operation,
                    "rows": change.rows,
                    "added": change.added,
                    "removed": change.removed,
                    "median_percent": round(change.median, 3) + 0.0,
                    "worst_percent": round(change.worst, 3) + 0.0,
                    "worst_at": change.worst_at,
                    "noise_percent": None if change.noise is None else round(change.noise, 3),
                    "verdict": change.verdict,
                }
                for change in self.operations
            ],
            "notes": list(self.notes),
        }

    def __rich__(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        table.add_column("operation")
        for column in ("rows", "added", "removed", "median", "worst", "noise"):
            table.add_column(column, justify="right")
        table.add_column("")
        table.add_column("worst at", overflow="fold")
        for change in self.operations:
            noise = "" if change.noise is None else f"{change.noise:.1f}%"
            table.add_row(
                Text(change.operation),
                str(change.rows),
                str(change.added or ""),
                str(change.removed or ""),
                f"{change.median:+.2f}%",
                f"{change.worst:+.2f}%",
                noise,
                Text(change.verdict, style="bold" if change.verdict == "moved" else ""),
                Text(change.worst_at if change.worst else ""),
            )
        return Group(table, *(Text(note) for note in self.notes))


def check_comparable(old: Mapping[str, Any], new: Mapping[str, Any], where: Path) -> None:
    """Raises InputError where the exports are not of one model in one format and layout."""
    for what in ("format", "model", "layout"):
        if old.get(what) != new.get(what):
            hint = f": give --layout {old.get(what)}" if what == "layout" else ""
            raise InputError(
                f"{where} is of {what} {old.get(what)!r}, the new export of {new.get(what)!r}{hint}"
            )


def compare(old: ExportTables, new: ExportTables, threshold: float) -> ExportChange:
    """What moved from `old` to `new`; `threshold` is in percent."""
    names = list(dict.fromkeys([*old.times, *new.times]))
    changes = (
        _change(name, old.times.get(name, {}), new.times.get(name, {}), threshold) for name in names
    )
    return ExportChange(
        str(new.manifest["format"]),
        str(new.manifest["model"]),
        threshold,
        tuple(changes),
        tuple(_notes(old, new)),
    )


def _change(
    name: str, old: Mapping[Key, Time], new: Mapping[Key, Time], threshold: float
) -> OperationChange:
    shared = [key for key in old if key in new]
    floor = FLOOR * statistics.median([abs(old[key].value) for key in shared] or [0.0])
    percents = {key: _percent(old[key].value, new[key].value, floor) for key in shared}
    noises = {key: _noise(old[key], new[key], floor) for key in shared}
    known = [noise for noise in noises.values() if noise is not None]
    worst = max(percents, key=lambda key: abs(percents[key]), default=None)
    median = statistics.median(percents.values()) if percents else 0.0
    noise = statistics.median(known) if known else None
    beyond = [key for key in shared if abs(percents[key]) > threshold]
    removed = len(old) - len(shared)
    verdict: Verdict = "within threshold" if any(percents.values()) else "equal"
    if removed or any(abs(percents[key]) > (noises[key] or 0.0) for key in beyond):
        verdict = "moved"
    elif beyond:
        verdict = "within noise"
    return OperationChange(
        name,
        len(shared),
        len(new) - len(shared),
        removed,
        median,
        percents[worst] if worst else 0.0,
        " ".join(worst) if worst else "",
        noise,
        verdict,
    )


def _percent(old: float, new: float, floor: float) -> float:
    """The change relative to the old time; one from nothing is 100%."""
    base = max(abs(old), floor)
    if base == 0:
        return math.copysign(100.0, new) if new else 0.0
    return 100 * (new - old) / base


def _noise(old: Time, new: Time, floor: float) -> float | None:
    """Percent that the spread of both times explains."""
    base = max(abs(old.value), floor)
    if old.std is None or new.std is None or base == 0:
        return None
    return 100 * NOISE * math.hypot(old.std, new.std) / base


def _notes(old: ExportTables, new: ExportTables) -> Iterable[str]:
    before, after = (side.manifest.get("environment") or {} for side in (old, new))
    if before.get("digest") != after.get("digest"):
        yield f"environments differ: {_place(old)} before, {_place(new)} now"
    for name in sorted({*old.opaque, *new.opaque}):
        if old.opaque.get(name) != new.opaque.get(name):
            yield f"{name} differs: its contents are not compared"


def _place(tables: ExportTables) -> str:
    environment = tables.manifest.get("environment") or {}
    parts = (
        tables.manifest.get("device"),
        environment.get("engine"),
        environment.get("engine_version"),
        str(environment.get("digest") or "")[:12],
    )
    return " ".join(str(part) for part in parts if part)
