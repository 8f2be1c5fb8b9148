"""The Revati bundle: its predictor, which needs numpy only, against the database."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shim_fixture as fixture

from dooly_backend.database import Database
from dooly_backend.database.records import Measurement
from dooly_backend.errors import InputError
from dooly_backend.exporters import get_exporter
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch, WorkloadPoint
from shims.common import random_batches
from shims.revati import RevatiExporter
from shims.revati.predictor import Predictor, Table

MODELS = (fixture.LLAMA, fixture.QWEN3, fixture.MIXTRAL)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[LatencyModel]]:
    folder = tmp_path_factory.mktemp("databases")
    by_routing = fixture.latency_models(folder, fixture.QWEN3_MOE, by_routing=True)
    known = {model: fixture.latency_models(folder, model) for model in MODELS}
    return known | {fixture.QWEN3_MOE: by_routing}


def export(models: list[LatencyModel], out: Path, **options: Any) -> dict[str, Any]:
    return RevatiExporter().export(models, out, options)


def requests_of(batch: Batch) -> list[tuple[int, int]]:
    return [(request.query, request.context) for request in batch.requests]


@pytest.mark.parametrize("name", [*MODELS, fixture.QWEN3_MOE])
def test_the_predictor_is_the_database(
    models: dict[str, list[LatencyModel]], tmp_path: Path, name: str
) -> None:
    export(models[name], tmp_path / "out")
    for model in models[name]:
        predictor = Predictor(tmp_path / "out", model.configuration.tensor_parallel)
        batches = random_batches(50, max_tokens=512, max_seqs=16, max_length=1024, prefills=4)
        for batch in batches:
            seconds = predictor.predict_step(requests_of(batch))
            assert 1e6 * seconds == pytest.approx(model.step_us(batch), rel=1e-3), batch.key
            for operation, occurrence in zip(predictor.operations, model.occurrences, strict=True):
                us = 1e6 * predictor.predict_batch(operation["op"], requests_of(batch))
                assert us == pytest.approx(model.occurrence(occurrence, batch).median_us, rel=1e-3)


def test_the_predictor_needs_numpy_only(
    models: dict[str, list[LatencyModel]], tmp_path: Path
) -> None:
    manifest = export(models[fixture.LLAMA], tmp_path / "out")
    script = (
        "import sys\n"
        "from predictor import Predictor\n"
        "p = Predictor('.', 2)\n"
        "print(p.predict('self_attn.qkv_proj', {'num_tokens': 100}))\n"
        "print(p.predict('self_attn.attn.prefill',"
        " {'prefill_chunk_size': 100, 'kv_cache_size': 77}))\n"
        "print(p.predict('self_attn.attn.decode', {'batch_size': 8, 'kv_cache_size': 512}))\n"
        "assert not {'pandas', 'scipy', 'sklearn', 'yaml', 'dooly_backend'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path / "out", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    qkv, prefill, decode = (1e6 * float(line) for line in done.stdout.split())
    model = models[fixture.LLAMA][1]
    by_name = {o.path.rpartition(".")[2]: o for o in model.occurrences}
    for got, name, batch in (
        (qkv, "qkv_proj", Batch.prefill(100)),
        (prefill, "attn", Batch.prefill(100, 77)),
        (decode, "attn", Batch.decode(8, 512)),
    ):
        assert got == pytest.approx(model.occurrence(by_name[name], batch).median_us, rel=1e-6)
    assert "predictor.py" in manifest["files"]


def test_measured_batches_win(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    model = fixture.latency_model(path, fixture.LLAMA)
    batch = Batch.parse("2x64+0,8x1+256")
    attention = next(o for o in model.occurrences if o.signature.kind == "batch")
    with Database.open(path) as database:
        point = WorkloadPoint.of("batch", batch)
        database.record(attention.signature, 1, Measurement(point, (5e4,)), 1)
        model = LatencyModel.load(database, fixture.LLAMA)
    export([model], tmp_path / "out")
    predictor = Predictor(tmp_path / "out")
    assert predictor.predict_batch("self_attn.attn", requests_of(batch)) == pytest.approx(5e-2)


def test_the_manifest_describes_every_table(
    models: dict[str, list[LatencyModel]], tmp_path: Path
) -> None:
    manifest = export(models[fixture.LLAMA], tmp_path / "out")
    for key in ("engine", "engine_version", "backend", "gpu", "driver", "target", "features"):
        assert key in manifest
    tables = [t for degree in manifest["degrees"].values() for t in degree["tables"]]
    csvs = {name for name in manifest["files"] if name.endswith(".csv")}
    assert {table["file"] for table in tables} == csvs
    known = {o.signature.hash for model in models[fixture.LLAMA] for o in model.occurrences}
    for table in tables:
        header = (tmp_path / "out" / table["file"]).read_text().splitlines()[0].split(",")
        assert header[: len(table["features"])] == table["features"]
        assert set(manifest["target"]["columns"]) <= set(header)
        assert set(table["features"]) <= set(manifest["features"])
        assert table["signature"] in known
    assert {t["phase"] for t in tables if "phase" in t} == {"prefill", "decode"}
    assert any("no compatibility" in note for note in manifest["approximations"])


def test_collectives_have_their_size_and_workers(tmp_path: Path) -> None:
    operation = fixture.operations(fixture.LLAMA)[0]
    collective = replace(operation, path="model.layers.*", name="vllm::all_reduce", per_layer=True)
    model = fixture.vidur_fixture.fixture_model(
        tmp_path / "a.db",
        (*fixture.operations(fixture.LLAMA), collective),
        config=fixture.configuration(fixture.LLAMA, 2),
    )
    manifest = export([model], tmp_path / "out")
    [name] = [name for name in manifest["files"] if "collectives/" in name]
    header, first, *_ = (tmp_path / "out" / name).read_text().splitlines()
    assert header.startswith("num_tokens,size_bytes,num_workers,")
    assert first.startswith(f"1,{4096 * 2},2,")


def test_tables_clamp_below_and_go_on_above(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    columns = "min_us,mean_us,median_us,max_us,std_us"
    path.write_text(f"n,{columns}\n10,1,2,3,4,5\n20,2,4,6,8,10\n")
    table = Table(path, ["n"])
    assert [table.at([n], "median_us") for n in (1, 10, 15, 30)] == [3, 3, 4.5, 9]
    path.write_text(f"n,m,{columns}\n1,1,1,1,1,1,1\n2,2,1,1,1,1,1\n")
    with pytest.raises(ValueError, match="no full grid"):
        Table(path, ["n", "m"])


def test_unknown_names(models: dict[str, list[LatencyModel]], tmp_path: Path) -> None:
    export(models[fixture.LLAMA], tmp_path / "out")
    with pytest.raises(KeyError, match="degree 8"):
        Predictor(tmp_path / "out", 8)
    with pytest.raises(KeyError, match="unknown operation"):
        Predictor(tmp_path / "out").predict("self_attn.nothing", {})
    with pytest.raises(InputError, match="no option 'layout'"):
        export(models[fixture.LLAMA], tmp_path / "b", layout="repo")


def test_repeated_exports_are_equal(models: dict[str, list[LatencyModel]], tmp_path: Path) -> None:
    digests = {export(models[fixture.LLAMA], tmp_path / name)["digest"] for name in ("a", "b")}
    assert len(digests) == 1
    assert json.loads((tmp_path / "a/manifest.json").read_text())["profiled_at"]


def test_a_folder_with_other_files_is_refused(
    models: dict[str, list[LatencyModel]], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"notes\.txt"):
        export(models[fixture.LLAMA], tmp_path)


def test_the_exporter_is_found() -> None:
    assert get_exporter("revati").name == "revati"
