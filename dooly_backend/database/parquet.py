"""A latency database as Parquet files: `dooly db export`.

One file a table, and `latency.parquet`, which joins a measurement with all that
it refers to. Samples are lists of floats there, other JSON stays text.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dooly_backend.database.content import TABLES
from dooly_backend.database.store import Database
from dooly_backend.errors import InputError

if TYPE_CHECKING:
    import pyarrow

_SAMPLES = (
    "samples_us", "live_us", "interval_us", "launch_us",
    "device_us", "alone_us", "schedule_us", "output_us", "begin_us",
)  # fmt: skip
_INTEGERS = ("layers", "tokens")
#: The view `latency`, with the samples.
_LATENCY = """\
SELECT l.*, m.samples_us FROM latency AS l
JOIN measurement AS m USING (signature, environment_id)
JOIN workload_point AS p ON p.id = m.point_id AND p.key = l.point"""


def export(database: Database, folder: Path) -> dict[str, int]:
    """Write `folder`/NAME.parquet for each table; rows by NAME.

    All files are of one snapshot, and each is whole or not there. Raises
    DatabaseError, InputError where `folder` is a file, OSError for a full disk.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: give a folder")
    with database.reading() as connection:
        queries = {table.name: f"SELECT * FROM {table.name}" for table in TABLES}
        tables = {}
        for name, query in (queries | {"latency": _LATENCY}).items():
            cursor = connection.execute(query)
            columns = [column for column, *_ in cursor.description]
            tables[name] = _table(columns, cursor.fetchall())
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        _write(table, folder / f"{name}.parquet")
    return {name: table.num_rows for name, table in tables.items()}


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> pyarrow.Table:
    import pyarrow as pa

    arrays = []
    for index, column in enumerate(columns):
        values = [row[index] for row in rows]
        if column in _SAMPLES or column in _INTEGERS:
            values = [None if value is None else json.loads(value) for value in values]
        arrays.append(pa.array(values, type=_type(column)))
    return pa.table(arrays, names=list(columns))


def _type(column: str) -> pyarrow.DataType | None:
    """Types that must not depend on the rows, of which there may be none; else None."""
    import pyarrow as pa

    if column in _SAMPLES:
        return pa.list_(pa.float64())
    if column in _INTEGERS:
        return pa.list_(pa.int64())
    return pa.float64() if column.endswith("_us") else None


def _write(table: pyarrow.Table, path: Path) -> None:
    import pyarrow.parquet

    handle, name = tempfile.mkstemp(suffix=".parquet.part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            pyarrow.parquet.write_table(table, file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
