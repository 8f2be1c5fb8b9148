"""The latency database: what was measured, of which signature, where.

    with Database.open("latency.db", create=True) as database:
        environment_id = database.add_environment(environment)
        configuration_id = database.add_configuration(configuration, graph, environment_id)
        database.record(signature, environment_id, measurement, configuration_id)

Every writing method is one transaction: killed at any time, the file holds
what earlier calls recorded and nothing of the interrupted one. Several
processes may write at once. Every method raises DatabaseError, in one line,
when the file cannot be read or written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dooly_backend.database import info, opening, rows
from dooly_backend.database.places import PlaceStore
from dooly_backend.database.records import (
    BEYOND_LIMITS,
    Configuration,
    Environment,
    Measurement,
    Occurrence,
    Signature,
    SkippedPoint,
)
from dooly_backend.database.rows import insertion
from dooly_backend.database.shipped import shipped_path
from dooly_backend.errors import DatabaseError, InputError
from dooly_backend.workload import WorkloadPoint

BUILTIN = "builtin:"

_POINT_ORDER = "p.num_tokens, p.num_reqs, p.id"  # as one reads a curve


class Database(PlaceStore):
    """An open latency database; a context manager. Make one with `Database.open`."""

    @classmethod
    def open(cls, path: Path | str, *, create: bool = False, read_only: bool = False) -> Database:
        """Open the file at `path`, or the shipped one that ``"builtin:NAME"`` names.

        `create` makes the file when there is none. An older file is migrated,
        in memory only when `read_only`. Raises DatabaseError, and InputError
        for an unknown NAME.
        """
        if str(path).startswith(BUILTIN):
            if create:
                raise InputError(f"{path} cannot be written: give a file of your own as --db")
            path = shipped_path(str(path).removeprefix(BUILTIN))
            read_only = True
        path = Path(path)
        if read_only:
            connection = opening.open_for_reading(path)
        else:
            connection = opening.open_for_writing(path, create=create)
        return cls(connection, path, read_only=read_only)

    # -- writing ---------------------------------------------------------------

    def add_environment(self, environment: Environment) -> int:
        """The row id of this environment, added unless it is known."""
        columns = rows.environment_columns(environment)
        with self.writing():
            self._execute(insertion("environment", columns, "(digest) DO NOTHING"), columns)
            return self._id("environment", "digest", environment.digest)

    def add_configuration(
        self,
        configuration: Configuration,
        occurrences: Sequence[Occurrence],
        environment_id: int | None = None,
    ) -> int:
        """The row id of this configuration, with its signatures and `occurrences`.

        They are its call graph in that environment, or in every one that has
        none of its own. A known configuration keeps its id and its measurements;
        its facts, and occurrences that differ from the stored ones, are replaced.
        """
        columns = rows.configuration_columns(configuration)
        wanted = sorted(occurrences, key=lambda occurrence: occurrence.position)
        with self.writing():
            conflict = "(digest) DO UPDATE SET facts = excluded.facts"
            self._execute(insertion("configuration", columns, conflict), columns)
            configuration_id = self._id("configuration", "digest", configuration.digest)
            if self._graph(configuration_id, environment_id) != wanted:
                self._execute(
                    "DELETE FROM occurrence WHERE configuration_id = ? AND environment_id IS ?",
                    (configuration_id, environment_id),
                )
                for occurrence in wanted:
                    self._add_signature(occurrence.signature)
                    place = rows.occurrence_columns(configuration_id, occurrence)
                    place |= {"environment_id": environment_id}
                    self._execute(insertion("occurrence", place), place)
        return configuration_id

    def record(
        self,
        signature: Signature,
        environment_id: int,
        measurement: Measurement,
        configuration_id: int | None = None,
        *,
        replace: bool = False,
    ) -> bool:
        """Store a measurement; true when it was stored.

        A point that is measured already keeps its samples unless `replace`, which adds
        what they cost to the new ones' cost; one that was skipped is measured now.
        `configuration_id` tells which configuration it was measured from. Raises
        InputError for samples that are no times, ValueError for a point that does not
        suit the signature.
        """
        with self.writing():
            return self._record(signature, environment_id, measurement, configuration_id, replace)

    def add_timing(
        self, signature_hash: str, environment_id: int, point: WorkloadPoint, us: float
    ) -> None:
        """Add to what a measured point cost: it was timed again, and its samples stay."""
        with self.writing():
            key = {"signature": signature_hash, "environment_id": environment_id}
            self._add_cost(key | {"point_id": self._id("workload_point", "key", point.key)}, us)

    def record_all(
        self,
        signature: Signature,
        environment_id: int,
        measurements: Iterable[Measurement],
        configuration_id: int | None = None,
    ) -> int:
        """Store those that are new, in one transaction, as `record` does; how many they were."""
        rest = (configuration_id, False)
        with self.writing():
            return sum(self._record(signature, environment_id, m, *rest) for m in measurements)

    def skip(
        self, signature: Signature, environment_id: int, point: WorkloadPoint, reason: str
    ) -> bool:
        """Store why a point cannot be measured; false when it is measured already.

        A later reason replaces an earlier one. Raises ValueError for a point
        that does not suit the signature.
        """
        with self.writing():
            key = self._settle(signature, environment_id, point)
            if self._exists("measurement", key):
                return False
            columns = key | {"reason": reason, "skipped_at": rows.now()}
            self._delete("skipped_point", key)
            self._execute(insertion("skipped_point", columns), columns)
        return True

    # -- reading ---------------------------------------------------------------

    def configurations(self) -> dict[int, Configuration]:
        """All configurations by row id."""
        with self.reading():
            found = self._execute("SELECT * FROM configuration ORDER BY id")
            return {row["id"]: rows.configuration_of(row) for row in found}

    def environments(self) -> dict[int, Environment]:
        """All environments by row id."""
        with self.reading():
            found = self._execute("SELECT * FROM environment ORDER BY id")
            return {row["id"]: rows.environment_of(row) for row in found}

    def signatures(self) -> dict[str, Signature]:
        """All signatures by hash."""
        with self.reading():
            found = self._execute("SELECT * FROM signature ORDER BY name, hash")
            return {row["hash"]: rows.signature_of(row) for row in found}

    def occurrences(
        self, configuration_id: int, environment_id: int | None = None
    ) -> list[Occurrence]:
        """A configuration's signatures in the order of the pass, in that environment.

        Without one: in the latest environment that has a graph of its own.
        """
        with self.reading():
            if environment_id is None:
                latest = self._execute(
                    "SELECT max(environment_id) AS id FROM occurrence WHERE configuration_id = ?",
                    (configuration_id,),
                )
                environment_id = latest.fetchone()["id"]
            own = self._graph(configuration_id, environment_id)
            return own or self._graph(configuration_id, None)

    def settled_points(self, signature_hash: str, environment_id: int) -> set[str]:
        """Keys of the points that are measured, or cannot be, in this environment.

        One that only a limit of an earlier run's engine kept out is not settled.
        """
        with self.reading():
            found = self._execute(
                "SELECT p.key FROM workload_point AS p WHERE p.id IN ("
                " SELECT point_id FROM measurement WHERE signature = :s AND environment_id = :e"
                " UNION ALL"
                " SELECT point_id FROM skipped_point WHERE signature = :s AND environment_id = :e"
                "  AND substr(reason, 1, length(:limits)) != :limits)",
                {"s": signature_hash, "e": environment_id, "limits": BEYOND_LIMITS},
            )
            return {row["key"] for row in found}

    def measurements(
        self, signature_hash: str, environment_id: int, *, oldest_first: bool = False
    ) -> list[Measurement]:
        """Everything measured of a signature in one environment, small points first.

        With `oldest_first` in the order in which it was measured.
        """
        order = "m.measured_at, m.id" if oldest_first else _POINT_ORDER
        with self.reading():
            found = self._execute(
                "SELECT m.samples_us, m.unstable, p.key FROM measurement AS m"
                " JOIN workload_point AS p ON p.id = m.point_id"
                f" WHERE m.signature = ? AND m.environment_id = ? ORDER BY {order}",
                (signature_hash, environment_id),
            )
            return [rows.measurement_of(row) for row in found]

    def timing_us(self, environment_id: int) -> dict[tuple[str, str], float]:
        """What measurements cost, microseconds of the device, by signature and point."""
        with self.reading():
            found = self._execute(
                "SELECT c.signature, p.key, c.timing_us FROM measurement_cost AS c"
                " JOIN workload_point AS p ON p.id = c.point_id WHERE c.environment_id = ?",
                (environment_id,),
            )
            return {(row["signature"], row["key"]): row["timing_us"] for row in found}

    def skipped(self, signature_hash: str, environment_id: int) -> list[SkippedPoint]:
        """The points of a signature that cannot run in this environment."""
        with self.reading():
            found = self._execute(
                "SELECT s.reason, p.key FROM skipped_point AS s"
                " JOIN workload_point AS p ON p.id = s.point_id"
                f" WHERE s.signature = ? AND s.environment_id = ? ORDER BY {_POINT_ORDER}",
                (signature_hash, environment_id),
            )
            return [rows.skipped_of(row) for row in found]

    def measured_at(self, configuration_id: int, environment_id: int) -> str | None:
        """When a configuration's last measurement was made: UTC, ISO 8601; None before any."""
        with self.reading():
            row = self._execute(
                "SELECT max(measured_at) AS latest FROM measurement"
                " WHERE environment_id = ? AND signature IN"
                " (SELECT signature FROM occurrence WHERE configuration_id = ?)",
                (environment_id, configuration_id),
            ).fetchone()
            return row["latest"]

    def coverage(self) -> dict[int, list[info.Coverage]]:
        """By configuration id: the environments that measured it, and how much of it."""
        with self.reading():
            return info.coverage(self._connection)

    def info(self) -> info.DatabaseInfo:
        """What `dooly db info` prints."""
        with self.reading():
            return info.collect(self._connection, self.path)

    # -- inside a transaction --------------------------------------------------

    def _graph(self, configuration_id: int, environment_id: int | None) -> list[Occurrence]:
        found = self._execute(
            "SELECT o.*, s.name, s.granularity, s.kind, s.canonical FROM occurrence AS o"
            " JOIN signature AS s ON s.hash = o.signature"
            " WHERE o.configuration_id = ? AND o.environment_id IS ? ORDER BY o.position",
            (configuration_id, environment_id),
        )
        return [rows.occurrence_of(row) for row in found]

    def _record(
        self,
        signature: Signature,
        environment_id: int,
        measurement: Measurement,
        configuration_id: int | None,
        replace: bool,
    ) -> bool:
        columns = rows.measurement_columns(measurement)
        key = self._settle(signature, environment_id, measurement.point)
        earlier_us = 0.0
        if self._exists("measurement", key):
            if not replace:
                return False
            earlier_us = self._cost(key)
            self._delete("measurement", key)
        self._delete("skipped_point", key)
        columns |= key | {"configuration_id": configuration_id}
        self._execute(insertion("measurement", columns), columns)
        if measurement.timing_us is not None:
            self._add_cost(key, earlier_us + measurement.timing_us)
        return True

    def _cost(self, key: dict) -> float:
        """What a measurement cost so far, microseconds; 0 where nobody looked."""
        row = self._execute(
            "SELECT timing_us FROM measurement_cost WHERE signature = :signature"
            " AND environment_id = :environment_id AND point_id = :point_id",
            key,
        ).fetchone()
        return row["timing_us"] if row else 0.0

    def _add_cost(self, key: dict, us: float) -> None:
        conflict = (
            "(signature, environment_id, point_id)"
            " DO UPDATE SET timing_us = timing_us + excluded.timing_us"
        )
        columns = key | {"timing_us": float(us)}
        self._execute(insertion("measurement_cost", columns, conflict), columns)

    def _settle(self, signature: Signature, environment_id: int, point: WorkloadPoint) -> dict:
        """The key of a (signature, environment, point), with its parents added."""
        if point.kind != signature.kind:
            raise ValueError(f"{point.key} is no point of {signature.name}: {signature.kind}")
        self._add_signature(signature)
        columns = rows.point_columns(point)
        self._execute(insertion("workload_point", columns, "(key) DO NOTHING"), columns)
        return {
            "signature": signature.hash,
            "environment_id": environment_id,
            "point_id": self._id("workload_point", "key", point.key),
        }

    def _add_signature(self, signature: Signature) -> None:
        columns = rows.signature_columns(signature)
        self._execute(insertion("signature", columns, "(hash) DO NOTHING"), columns)
        row = self._execute("SELECT * FROM signature WHERE hash = ?", (signature.hash,)).fetchone()
        stored = rows.signature_of(row)
        if stored != signature:
            raise DatabaseError(
                f"database {self.path} knows signature {signature.hash[:12]} as {stored.name} "
                f"({stored.granularity}, {stored.kind}), not as {signature.name} "
                f"({signature.granularity}, {signature.kind}): profile into a new --db"
            )
