"""Is a latency database sound? `dooly db check`.

Every check is a generator of problems, one line each, that reads one snapshot.
What is merely unfinished (a profile that was interrupted) is no problem, but a
note.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dooly_backend.database import migrations, rows
from dooly_backend.database.session import Session
from dooly_backend.database.store import Database
from dooly_backend.errors import DamagedError, InputError
from dooly_backend.workload import WorkloadPoint

Check = Callable[[sqlite3.Connection], Iterator[str]]

#: Statistics of the same samples differ by rounding between Python versions.
_TOLERANCE = 1e-9
_SHOWN = 12  # hex digits of a hash


@dataclass(frozen=True)
class CheckReport:
    """What is wrong with a file, and what of it is unfinished."""

    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


def check_file(path: Path | str) -> CheckReport:
    """Check the file at `path`, or a shipped one, without touching it.

    Raises DatabaseError for what is no latency database that this version can
    read; one that is damaged or cut short is a problem.
    """
    try:
        with Database.open(path, read_only=True) as database:
            return check(database)
    except DamagedError as error:
        return CheckReport((str(error),))


def check(database: Session) -> CheckReport:
    """Check everything that one snapshot of an open database holds."""
    try:
        with database.reading() as connection:
            problems = list(integrity(connection))
            if not problems:  # else the others read what is lost
                problems = list(_rows(connection))
            notes = () if problems else tuple(unfinished(connection))
    except DamagedError as error:
        return CheckReport((str(error),))
    return CheckReport(tuple(problems), notes)


def _rows(connection: sqlite3.Connection) -> Iterator[str]:
    """The schema, and every check that it allows."""
    of_schema = list(schema(connection))
    yield from of_schema
    for check in CHECKS:
        try:
            yield from list(check(connection))
        except (IndexError, sqlite3.OperationalError):
            if not of_schema:  # else it misses what the schema misses
                raise


# -- the file ------------------------------------------------------------------


def integrity(connection: sqlite3.Connection) -> Iterator[str]:
    """SQLite's own: pages, indices, CHECK, NOT NULL and UNIQUE."""
    for (text,) in connection.execute("PRAGMA integrity_check"):
        if text != "ok":
            yield f"SQLite finds: {text}"


def foreign_keys(connection: sqlite3.Connection) -> Iterator[str]:
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check"):
        yield f"{table} row {row} refers to a row of {parent} that does not exist"


def schema(connection: sqlite3.Connection) -> Iterator[str]:
    """Tables, indices and views are those of this version; no trigger changes rows behind us."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as blank:
        migrations.migrate(blank)
        expected = _objects(blank)
    found = _objects(connection)
    for name, sql in expected.items():
        if name not in found:
            yield f"{name} is missing from the schema"
        elif found[name] != sql:
            yield f"{name} is not defined as version {migrations.latest_version()} defines it"
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'"):
        yield f"trigger {name} is none of Dooly's: it may change rows"


def _objects(connection: sqlite3.Connection) -> dict[str, str]:
    found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql NOT NULL")
    return {name: sql for name, sql in found if not name.startswith(("sqlite_", "_sqlite_"))}


# -- identities ----------------------------------------------------------------


def signatures(connection: sqlite3.Connection) -> Iterator[str]:
    """A signature's key is the SHA-256 of its canonical text."""
    for row in connection.execute("SELECT hash, name, canonical FROM signature"):
        if hashlib.sha256(row["canonical"].encode()).hexdigest() != row["hash"]:
            yield f"{row['name']}: hash {row['hash'][:_SHOWN]} is not that of its canonical text"


def digests(connection: sqlite3.Connection) -> Iterator[str]:
    """Environments and configurations hold what their digests were made of."""
    for table, record in (
        ("environment", rows.environment_of),
        ("configuration", rows.configuration_of),
    ):
        for row in connection.execute(f"SELECT * FROM {table}"):
            where = f"{table} {row['id']}"
            try:
                digest = record(row).digest
            except (ValueError, TypeError) as error:
                yield f"{where} cannot be read: {error}"
                continue
            if digest != row["digest"]:
                yield f"{where}: digest {row['digest'][:_SHOWN]} is not that of its facts"


def points(connection: sqlite3.Connection) -> Iterator[str]:
    """The columns of a workload point repeat its key."""
    for row in connection.execute("SELECT * FROM workload_point"):
        try:
            point = WorkloadPoint.parse(row["key"])
        except InputError as error:
            yield f"workload_point {row['id']}: {error}"
            continue
        columns = rows.point_columns(point)
        wrong = [name for name, value in columns.items() if row[name] != value]
        if wrong:
            yield f"workload_point {row['key']}: {', '.join(wrong)} disagrees with the key"


# -- what was measured ---------------------------------------------------------

_SETTLED = (
    "SELECT {table}.*, s.name, s.kind, p.key, p.kind AS point_kind FROM {table}"
    " JOIN signature AS s ON s.hash = {table}.signature"
    " JOIN workload_point AS p ON p.id = {table}.point_id"
)


def measurements(connection: sqlite3.Connection) -> Iterator[str]:
    """Statistics are those of the samples, and points suit their signatures."""
    for row in connection.execute(_SETTLED.format(table="measurement")):
        where = f"measurement {row['id']} ({row['name']} at {row['key']})"
        if row["kind"] != row["point_kind"]:
            yield f"{where}: a point of {row['point_kind']}, but the time depends on {row['kind']}"
        try:
            columns = rows.measurement_columns(rows.measurement_of(row))
        except (ValueError, TypeError, InputError) as error:
            yield f"{where}: samples cannot be read: {error}"
            continue
        yield from _differing(where, row, columns, exempt=("samples_us", "measured_at"))


def skipped(connection: sqlite3.Connection) -> Iterator[str]:
    """A point is measured or skipped, never both; it suits its signature."""
    for row in connection.execute(_SETTLED.format(table="skipped_point")):
        if row["kind"] != row["point_kind"]:
            yield (
                f"skipped point {row['key']} of {row['name']} is one of {row['point_kind']}, "
                f"but the time depends on {row['kind']}"
            )
    both = connection.execute(
        "SELECT s.name, p.key FROM measurement AS m"
        " JOIN skipped_point AS k USING (signature, environment_id, point_id)"
        " JOIN signature AS s ON s.hash = m.signature JOIN workload_point AS p ON p.id = m.point_id"
    )
    for name, key in both:
        yield f"{name} at {key} is measured and skipped: it can only be one of them"


def doubled(connection: sqlite3.Connection) -> Iterator[str]:
    """No point is measured twice, also where an index was lost."""
    found = connection.execute(
        "SELECT s.name, p.key, count(*) FROM measurement AS m"
        " JOIN signature AS s ON s.hash = m.signature JOIN workload_point AS p ON p.id = m.point_id"
        " GROUP BY m.signature, m.environment_id, p.key HAVING count(*) > 1"
    )
    for name, key, count in found:
        yield f"{name} at {key} is there {count} times in one environment"


def graphs(connection: sqlite3.Connection) -> Iterator[str]:
    """A call graph is whole: positions without gap, as many runs as layers or more."""
    found: dict[tuple[int, int | None], list[sqlite3.Row]] = defaultdict(list)
    for row in connection.execute("SELECT * FROM occurrence ORDER BY position"):
        found[row["configuration_id"], row["environment_id"]].append(row)
    for (configuration, environment), places in found.items():
        where = f"call graph of configuration {configuration} in environment {environment}"
        positions = [row["position"] for row in places]
        if positions != list(range(len(positions))):
            yield f"{where} has gaps: its positions are {_short(positions)}"
        for row in places:
            try:
                layers = json.loads(row["layers"])
            except ValueError:
                yield f"{where}: the layers of {row['path']} cannot be read"
                continue
            if layers and row["count"] % len(layers):
                yield f"{where}: {row['path']} runs {row['count']} times in {len(layers)} layers"


def steps(connection: sqlite3.Connection) -> Iterator[str]:
    """The median of a live step is that of its samples."""
    for row in connection.execute("SELECT * FROM step_measurement"):
        where = f"step {row['batch']} with {row['num_layers']} layers"
        try:
            columns = rows.step_columns(rows.step_of(row))
        except (ValueError, TypeError, InputError) as error:
            yield f"{where} cannot be read: {error}"
            continue
        yield from _differing(where, row, columns, exempt=("live_us", "measured_at"))


def stream_steps(connection: sqlite3.Connection) -> Iterator[str]:
    """Statistics of steps in a row, and of the host's part of them, are those of the samples."""
    tables: tuple[tuple[str, Callable[[sqlite3.Row], rows.Columns]], ...] = (
        ("stream_step", lambda row: rows.stream_step_columns(rows.stream_step_of(row))),
        ("host_step", lambda row: rows.host_step_columns(rows.host_step_of(row))),
    )
    for table, columns_of in tables:
        for row in connection.execute(f"SELECT * FROM {table}"):
            where = f"{table} {row['batch' if table == 'stream_step' else 'num_reqs']}"
            try:
                columns = columns_of(row)
            except (ValueError, TypeError, InputError) as error:
                yield f"{where} cannot be read: {error}"
                continue
            samples = [name for name, value in columns.items() if str(value).startswith("[")]
            yield from _differing(where, row, columns, exempt=(*samples, "measured_at"))


def clock_rows(connection: sqlite3.Connection) -> Iterator[str]:
    """Every step of a row has its tokens, when it began and what it took."""
    for row in connection.execute("SELECT * FROM clock_row"):
        where = f"clock row {row['pattern']!r} of {row['num_layers']} layers"
        try:
            if not rows.clock_steps_of(row):
                yield f"{where} has no steps"
        except (ValueError, TypeError, InputError) as error:
            yield f"{where} cannot be read: {error}"


CHECKS: tuple[Check, ...] = (
    foreign_keys,
    signatures,
    digests,
    points,
    measurements,
    skipped,
    doubled,
    graphs,
    steps,
    stream_steps,
    clock_rows,
)


def unfinished(connection: sqlite3.Connection) -> Iterator[str]:
    """Configurations that were begun somewhere and are not complete there."""
    found = connection.execute("SELECT * FROM configuration_coverage WHERE NOT complete")
    for row in found:
        yield (
            f"{row['model']} on {row['device']} has {row['measured']} of {row['signatures']} "
            f"signatures measured: `dooly profile {row['model']}` goes on"
        )


def _differing(
    where: str, row: sqlite3.Row, columns: rows.Columns, exempt: tuple[str, ...]
) -> Iterator[str]:
    for name, value in columns.items():
        stored = row[name]
        if name in exempt or stored == value:
            continue
        numbers = isinstance(value, float) and isinstance(stored, int | float)
        if not (numbers and math.isclose(stored, value, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)):
            yield f"{where}: {name} is {stored}, its samples give {value}"


def _short(values: list[int]) -> str:
    text = ", ".join(map(str, values[:8]))
    return f"{text}, ..." if len(values) > 8 else text
