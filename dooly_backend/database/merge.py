"""Uniting latency databases: `dooly db merge`.

The union does not depend on the order of the files, and merging again changes
nothing. Contents are cut into *units* that stay together (a point's samples, a
call graph, the live steps with the cost fitted to them). Environments are told
apart by the digest of their facts, so measurements of two never meet; where two
files hold the same unit with other contents, a total order over the contents
says which one stays, whole: nothing is averaged or mixed.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dooly_backend.database.check import check
from dooly_backend.database.content import BY_NAME, IDENTITY, Contents, Row, contents
from dooly_backend.database.content import content_digest as digest_of
from dooly_backend.database.rows import insertion, matching
from dooly_backend.database.session import Session
from dooly_backend.database.store import Database
from dooly_backend.errors import InputError


@dataclass(frozen=True, eq=False)
class Body:
    """The rows of one unit, by table."""

    rows: Mapping[str, list[Row]]

    @cached_property
    def text(self) -> str:
        """Equal for equal rows, whatever their order."""
        return json.dumps(
            {
                table: sorted(json.dumps(row, sort_keys=True) for row in rows)
                for table, rows in self.rows.items()
            },
            sort_keys=True,
        )

    def of(self, table: str) -> list[Row]:
        return self.rows.get(table, [])


Rank = Callable[[Body], tuple[Any, ...]]


@dataclass(frozen=True)
class Unit:
    """Rows that stay together: those of `tables` that agree in the columns `key`.

    Of two bodies of one key the one of the higher `rank` stays; equal ranks are
    told apart by the text of their rows.
    """

    name: str
    tables: tuple[str, ...]
    key: tuple[str, ...]
    rank: Rank = lambda body: ()


def _earliest(column: str) -> Rank:
    """The one that was there first."""
    return lambda body: (
        _Reversed(min(row[column] for rows in body.rows.values() for row in rows)),
    )


def _of_point(body: Body) -> tuple[Any, ...]:
    """Measured here, before taken over, before skipped; then stable, more samples, earlier.

    Of equal ones the one whose cost is known.
    """
    measured = body.of("measurement")
    if not measured:
        return (0, 0, 0, _Reversed(""), False)
    (row,) = measured
    level = 1 if body.of("inherited") else 2
    known = bool(body.of("measurement_cost"))
    return (level, 1 - row["unstable"], row["n"], _Reversed(row["measured_at"]), known)


def _of_steps(body: Body) -> tuple[Any, ...]:
    """Fitted before not, then more steps, then the later."""
    steps = body.of("step_measurement")
    latest = max((row["measured_at"] for row in steps), default="")
    return (len(body.of("step_cost")), len(steps), latest)


def _of_stream(body: Body) -> tuple[Any, ...]:
    """As `_of_steps`: fitted before not, then more steps, then the later."""
    steps = body.of("stream_step")
    latest = max((row["measured_at"] for row in steps), default="")
    return (bool(body.of("stream_cost")), len(steps), len(body.of("host_step")), latest)


def _of_clock(body: Body) -> tuple[Any, ...]:
    """More patterns, then the later: those of one engine belong together."""
    rows = body.of("clock_row")
    return (len(rows), max((row["measured_at"] for row in rows), default=""))


def _latest_end(body: Body) -> tuple[Any, ...]:
    """Of two states of one run, the later."""
    return (max(row["ended_at"] for rows in body.rows.values() for row in rows),)


_POINT_KEY = ("signature", "environment_id", "point_id")
_PLACE_KEY = ("configuration_id", "environment_id")
_OF_POINT = ("measurement", "inherited", "measurement_cost", "skipped_point")

#: Parents first.
UNITS = (
    Unit("environment", ("environment",), ("digest",), _earliest("added_at")),
    Unit("configuration", ("configuration",), ("digest",), _earliest("added_at")),
    Unit("signature", ("signature",), ("hash",)),
    Unit("workload point", ("workload_point",), ("key",)),
    Unit("call graph", ("occurrence",), _PLACE_KEY),
    Unit("point", _OF_POINT, _POINT_KEY, _of_point),
    Unit("steps", ("step_measurement", "step_cost"), _PLACE_KEY, _of_steps),
    Unit("steps in a row", ("stream_step", "host_step", "stream_cost"), _PLACE_KEY, _of_stream),
    Unit("clock", ("clock_row",), (*_PLACE_KEY, "num_layers"), _of_clock),
    Unit("runs", ("run_conditions",), (*_PLACE_KEY, "started_at"), _latest_end),
    Unit("KV capacity", ("kv_capacity",), _PLACE_KEY, _earliest("recorded_at")),
)


@dataclass(frozen=True)
class MergeResult:
    """What a merge did, by kind of unit, and the digest of what the file holds now."""

    added: Mapping[str, int]
    replaced: Mapping[str, int]
    kept: Mapping[str, int]  # other contents in a merged file that were left out
    content_digest: str


def merge(into: Path | str, sources: Sequence[Path | str]) -> MergeResult:
    """Unite `sources` into the file `into`, which is created if there is none.

    All of it is one transaction. Raises InputError, with nothing changed, for a
    file that `dooly db check` finds unsound, or when two files know a signature
    by different names; DatabaseError for one that cannot be read or written.
    """
    read = []
    for source in sources:
        with Database.open(source, read_only=True) as database:
            read.append(_sound(database))
    _refuse_contradictions(read)  # before a file is made
    with Database.open(into, create=True) as database:
        _sound(database)
        with database.writing() as connection:
            own = contents(connection)
            _refuse_contradictions([own, *read])
            before = _units(own)
            after = united([before, *map(_units, read)])
            _write(connection, before, after)
            now = digest_of(contents(connection))
    return MergeResult(*_counts(before, after, map(_units, read)), now)


def _sound(database: Session) -> Contents:
    report = check(database)
    if not report.ok:
        more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        raise InputError(
            f"database {database.path} is not sound: {report.problems[0]}{more}; nothing was "
            f"merged: see `dooly db check --db {database.path}`"
        )
    with database.reading() as connection:
        return contents(connection)


def _refuse_contradictions(files: Iterable[Contents]) -> None:
    known: dict[str, Row] = {}
    for found in files:
        for row in found["signature"]:
            other = known.setdefault(row["hash"], row)
            if other != row:
                raise InputError(
                    f"signature {row['hash'][:12]} is {row['name']} ({row['granularity']}, "
                    f"{row['kind']}) in one file and {other['name']} ({other['granularity']}, "
                    f"{other['kind']}) in another: nothing was merged; profile one of them anew"
                )


# -- the union -----------------------------------------------------------------

Units = dict[tuple[str, tuple[Any, ...]], Body]


def _units(found: Contents) -> Units:
    units: Units = {}
    for unit in UNITS:
        bodies: dict[tuple[Any, ...], dict[str, list[Row]]] = defaultdict(dict)
        for table in unit.tables:
            for row in found[table]:
                key = tuple(row[column] for column in unit.key)
                bodies[key].setdefault(table, []).append(row)
        units |= {(unit.name, key): Body(rows) for key, rows in bodies.items()}
    return units


def united(files: Sequence[Units]) -> Units:
    """Every unit of any of the files, with the body that stays."""
    ranks = {unit.name: unit.rank for unit in UNITS}
    union: Units = {}
    for units in files:
        for key, body in units.items():
            other = union.get(key)
            rank = ranks[key[0]]
            if other is None or (*rank(body), body.text) > (*rank(other), other.text):
                union[key] = body
    return union


@dataclass(frozen=True)
class _Reversed:
    """Text of which the smaller one is the greater."""

    text: str

    def __lt__(self, other: _Reversed) -> bool:
        return other.text < self.text


def _counts(
    before: Units, after: Units, sources: Iterable[Units]
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    added, replaced, kept = ({unit.name: 0 for unit in UNITS} for _ in range(3))
    for key, body in after.items():
        if key not in before:
            added[key[0]] += 1
        elif before[key].text != body.text:
            replaced[key[0]] += 1
    for units in sources:
        for key, body in units.items():
            kept[key[0]] += body.text != after[key].text
    return added, replaced, kept


# -- writing it ----------------------------------------------------------------


def _write(connection: sqlite3.Connection, before: Units, after: Units) -> None:
    """Make the file hold `after`. Parents come first in `after`'s order of units."""
    ids: dict[str, dict[str, int]] = {parent: {} for parent in IDENTITY}
    for unit in UNITS:
        for (name, key), body in after.items():
            earlier = before.get((name, key))
            if name != unit.name or (earlier is not None and earlier.text == body.text):
                continue
            for table in unit.tables:
                if table in IDENTITY or table == "signature":
                    _upsert(connection, table, body.of(table))
                    continue
                place = dict(zip(unit.key, key, strict=True))
                _delete(connection, table, _with_ids(table, place, ids))
                for row in body.of(table):
                    columns = _with_ids(table, row, ids)
                    connection.execute(insertion(table, columns), columns)
        for parent, column in IDENTITY.items():
            if parent in unit.tables:
                found = connection.execute(f"SELECT {column}, id FROM {parent}")
                ids[parent] = dict(map(tuple, found))


def _upsert(connection: sqlite3.Connection, table: str, rows: Iterable[Row]) -> None:
    (key,) = BY_NAME[table].key
    for row in rows:
        changes = ", ".join(f"{column} = excluded.{column}" for column in row)
        connection.execute(insertion(table, row, f"({key}) DO UPDATE SET {changes}"), row)


def _delete(connection: sqlite3.Connection, table: str, place: Row) -> None:
    condition = matching(place).replace(" = ", " IS ")  # an environment may be NULL
    connection.execute(f"DELETE FROM {table} WHERE {condition}", place)


def _with_ids(table: str, row: Row, ids: Mapping[str, Mapping[str, int]]) -> Row:
    columns = dict(row)
    for column, parent in BY_NAME[table].references.items():
        if columns.get(column) is not None:
            columns[column] = ids[parent][columns[column]]
    return columns
