"""`dooly db export`: Parquet files that hold what the database holds."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from conftest import Dooly
from sample_records import ATTENTION, LINEAR, SAMPLER, at, store

from dooly_backend.database import Database
from dooly_backend.database.content import TABLES
from dooly_backend.database.parquet import export
from dooly_backend.database.records import StepCost, StepMeasurement
from dooly_backend.errors import InputError
from dooly_backend.workload import Batch, WorkloadPoint


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "latency.db"
    with Database.open(path, create=True) as database:
        ids = store(
            database,
            {
                LINEAR: [at("tokens=8", 1 / 3, 2.0), at("tokens=16", 4.0)],
                ATTENTION: [at("batch=1x16+0", 5.0)],
            },
        )
        database.skip(SAMPLER, ids[1], WorkloadPoint.parse("requests=9"), "out of memory")
        database.record_step(*ids, StepMeasurement(Batch.prefill(32), 2, (90.0, 91.5), 70.0))
        database.set_step_cost(*ids, StepCost(1.0, 2.0, 3.0))
    return path


def test_every_table_comes_back(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "parquet"
    with Database.open(path, read_only=True) as database:
        rows = export(database, out)
    assert rows["measurement"] == rows["latency"] == 3
    assert {file.stem for file in out.iterdir()} == {t.name for t in TABLES} | {"latency"}
    measured = pd.read_parquet(out / "measurement.parquet")
    assert [list(samples) for samples in measured["samples_us"]] == [[1 / 3, 2.0], [4.0], [5.0]]
    joined = pd.read_parquet(out / "latency.parquet").set_index("point")
    assert joined.loc["tokens=8", "device"] == "NVIDIA H200"
    assert list(joined.loc["tokens=8", "samples_us"]) == [1 / 3, 2.0]
    occurrences = pd.read_parquet(out / "occurrence.parquet")
    assert list(occurrences["layers"][1]) == list(range(28))
    steps = pd.read_parquet(out / "step_measurement.parquet")
    assert list(steps["live_us"][0]) == [90.0, 91.5]


def test_an_empty_table_has_its_columns(tmp_path: Path) -> None:
    with Database.open(tmp_path / "empty.db", create=True) as database:
        rows = export(database, tmp_path / "out")
    assert set(rows.values()) == {0}
    measured = pd.read_parquet(tmp_path / "out" / "measurement.parquet")
    assert "samples_us" in measured.columns
    assert measured["median_us"].dtype == float


def test_an_export_replaces_an_earlier_one(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        with Database.open(path) as database:
            rows = export(database, out)
            store(database, {LINEAR: [at("tokens=64", 1.0)]})
    assert rows["measurement"] == 4
    assert len(pd.read_parquet(out / "measurement.parquet")) == 4
    assert not list(out.glob("*.part"))


def test_a_file_is_no_folder(path: Path) -> None:
    with (
        Database.open(path, read_only=True) as database,
        pytest.raises(InputError, match="is a file: give a folder"),
    ):
        export(database, path)


def test_the_command(path: Path, dooly: Dooly) -> None:
    result = dooly("db", "export", "-o", "out", "--json")
    assert json.loads(result.stdout)["rows"]["measurement"] == 3
    told = dooly("db", "export", "--db", "builtin:h200", "-o", "h200")
    with Database.open("builtin:h200") as shipped:
        measurements = shipped.info().measurements
    assert measurements > 1000
    assert f"latency.parquet: {measurements} rows" in told.stdout
