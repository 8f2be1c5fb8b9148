"""Where the files lie: as the repository reads them, or as the PyPI release does."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common import cell_text as _text
from ..common import write
from .mapping import ATTENTION_OPS
from .model import Device, Dimensions
from .ranges import Layout
from .tables import COPY_COLUMN, STATISTICS, Row, Tables, network_columns

_ORGANISATION = "dooly"
_REVISION_LENGTH = 40  # of a git commit, which the hub's cache names snapshots by


@dataclass(frozen=True)
class Placement:
    """What the launcher needs to find the tables, relative to the export.

    `flags` are file flags of the repository; `datasets` names of the PyPI release.
    """

    flags: dict[str, str]
    datasets: dict[str, str]


def write_tables(
    folder: Path, tables: Tables, dimensions: Dimensions, device: Device, layout: Layout
) -> Placement:
    """Write all tables under `folder`. Raises OSError."""
    if layout == "repo":
        return _write_repo(folder, tables, dimensions, device)
    return _write_pypi(folder, tables, dimensions, device)


def _write_repo(folder: Path, tables: Tables, dimensions: Dimensions, device: Device) -> Placement:
    compute = f"data/profiling/compute/{device.name}/{dimensions.name}"
    network = f"data/profiling/network/{device.network}"
    flags = {
        "compute": f"{compute}/mlp.csv",
        "attention": f"{compute}/attention.csv",
        "all_reduce": f"{network}/all_reduce.csv",
        "send_recv": f"{network}/send_recv.csv",
    }
    texts = _texts(tables)
    for name, text in zip(flags.values(), texts.values(), strict=True):
        write(folder / name, text.encode())
    return Placement(flags, {})


def _write_pypi(folder: Path, tables: Tables, dimensions: Dimensions, device: Device) -> Placement:
    texts = _texts(tables)
    compute = {"mlp.csv.xz": texts["mlp"], "attention.csv.xz": texts["attention"]}
    network = {"all_reduce.csv.xz": texts["all_reduce"], "send_recv.csv.xz": texts["send_recv"]}
    label = dimensions.name.replace("/", "-").lower()
    datasets = {
        "compute": _write_dataset(
            folder / "profiling_data" / "compute",
            f"{label}-{device.name}",
            {"model": dimensions.name, "device_sku": device.name},
            compute,
        ),
        "network": _write_dataset(
            folder / "profiling_data" / "network", device.network, {"sku": device.network}, network
        ),
    }
    return Placement({}, datasets)


def _write_dataset(folder: Path, label: str, config: dict[str, str], texts: dict[str, str]) -> str:
    """A dataset as the Hugging Face hub caches it; returns its id.

    The id and the revision hold the content's digest: Vidur caches by id.
    """
    content = json.dumps([config, texts], sort_keys=True).encode()
    revision = hashlib.sha256(content).hexdigest()[:_REVISION_LENGTH]
    name = f"{label}-{revision[:12]}"
    root = folder / f"datasets--{_ORGANISATION}--{name}"
    write(root / "refs" / "main", revision.encode())
    snapshot = root / "snapshots" / revision
    write(snapshot / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    for file, text in texts.items():
        write(snapshot / file, lzma.compress(text.encode(), preset=1))
    return f"{_ORGANISATION}/{name}"


def _texts(tables: Tables) -> dict[str, str]:
    return {
        "mlp": _csv(tables.mlp),
        "attention": _attention_csv(tables),
        "all_reduce": _csv(tables.all_reduce, network_columns("all_reduce")),
        "send_recv": _csv(tables.send_recv, network_columns("send_recv")),
    }


def _attention_csv(tables: Tables) -> str:
    """attention.csv, which has by far the most rows: text is put together once for each."""
    times = [f"time_stats.{op}.{statistic}" for op in ATTENTION_OPS for statistic in STATISTICS]
    shared = list(next(iter(tables.attention_columns.values())))
    places = ["batch_size", "prefill_chunk_size", "kv_cache_size", "is_prefill"]
    ends = {
        degree: ",".join(map(str, columns.values()))
        for degree, columns in tables.attention_columns.items()
    }
    places_of = {name: ATTENTION_OPS.index(name) for name in ("attn_prefill", "attn_decode")}
    zeros = len(STATISTICS) * len(ATTENTION_OPS) - len(STATISTICS)
    before = {name: "0," * len(STATISTICS) * index for name, index in places_of.items()}
    after = {name: ",0" * (zeros - len(STATISTICS) * index) for name, index in places_of.items()}
    lines = [",".join([*times, *places, *shared, COPY_COLUMN])]
    for degree, batch_size, chunk, length, cell, copies in tables.attention:
        name = "attn_prefill" if chunk else "attn_decode"
        text = (
            f"{before[name]}{cell.min:.9g},{cell.max:.9g},{cell.mean:.9g},{cell.median:.9g},"
            f"{cell.std:.9g}{after[name]},{batch_size},{chunk},{length},{chunk > 0},{ends[degree]},"
        )
        lines += [f"{text}{copy}" for copy in range(copies)]
    return "\n".join(lines) + "\n"


def _csv(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """CSV text; `columns` are for a table without rows."""
    columns = list(rows[0]) if rows else list(columns)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(_lines(rows, columns))
    return buffer.getvalue()


def _lines(rows: Sequence[Row], columns: Sequence[str]) -> Iterator[list[str]]:
    """The cells of each row as text; copies, which differ in the last column alone, at once."""
    known: list[object] = []
    texts: list[str] = []
    for row in rows:
        *values, copy = [row[column] for column in columns]
        if values != known:
            known, texts = values, [_text(value) for value in values]
        yield [*texts, _text(copy)]
