"""`dooly import`: other profilers' tables in, and out again as they were."""

from __future__ import annotations

import csv
import json
import lzma
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shim_fixture
import vidur_fixture

from dooly_backend.config import load_model
from dooly_backend.database import Database
from dooly_backend.errors import InputError
from dooly_backend.export_command import load_models
from dooly_backend.export_tables import read_export
from dooly_backend.exporters import get_exporter
from dooly_backend.importers import Wanted, get_importer, importer_names, store
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch, Request
from shims.vidur.ranges import LAYOUTS

Dooly = Callable[..., Any]
SMALL = {"max_length": 640, "max_chunk": 512, "max_batch": 8}


def exported(folder: Path, name: str, model: str, **options: Any) -> Path:
    """An export of a fixture of `model` at two degrees."""
    models = shim_fixture.latency_models(folder, model)
    get_exporter(name).export(models, folder / "old", options)
    return folder / "old"


def imported(folder: Path, name: str, database: Path, **wanted: Any) -> list[LatencyModel]:
    profiles = get_importer(name).read(folder, Wanted(**wanted))
    with Database.open(database, create=True) as opened:
        store(opened, profiles)
    with Database.open(database, read_only=True) as opened:
        return load_models(opened, None, None)


def differences(old: Path, new: Path, unread: tuple[str, ...] = ()) -> Iterator[float]:
    """Relative changes of all times that both exports hold."""
    before, after = read_export(old).times, read_export(new).times
    assert before.keys() == after.keys()
    for operation, times in before.items():
        if operation in unread:
            continue
        shared = times.keys() & after[operation].keys()
        assert len(shared) > 0.9 * len(times), operation
        for key in shared:
            value = times[key].value
            yield abs(after[operation][key].value - value) / max(abs(value), 1e-6)


# -- there and back -----------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vidur_tables_come_back(tmp_path: Path, layout: str) -> None:
    old = exported(tmp_path, "vidur", shim_fixture.LLAMA, layout=layout, **SMALL)
    models = imported(old, "vidur", tmp_path / "imported.db")
    assert [model.configuration.tensor_parallel for model in models] == [1, 2]
    manifest = get_exporter("vidur").export(models, tmp_path / "new", {"layout": layout})
    assert manifest["vidur_model"] == shim_fixture.LLAMA
    assert max(differences(old, tmp_path / "new", unread=("emb",))) < 0.01


@pytest.mark.parametrize("model", [shim_fixture.LLAMA, shim_fixture.QWEN3])
def test_llmservingsim_tables_come_back(tmp_path: Path, model: str) -> None:
    old = exported(tmp_path, "llmservingsim", model)
    models = imported(old, "llmservingsim", tmp_path / "imported.db")
    assert [each.configuration.tensor_parallel for each in models] == [1, 2]
    get_exporter("llmservingsim").export(models, tmp_path / "new", {})
    assert max(differences(old, tmp_path / "new")) < 0.01


def test_experts_come_back(tmp_path: Path) -> None:
    model = shim_fixture.QWEN3_MOE
    models = shim_fixture.latency_models(tmp_path, model, by_routing=True)
    get_exporter("llmservingsim").export(models, tmp_path / "old", {})
    again = imported(tmp_path / "old", "llmservingsim", tmp_path / "imported.db")
    get_exporter("llmservingsim").export(again, tmp_path / "new", {})
    assert max(differences(tmp_path / "old", tmp_path / "new")) < 0.01


def test_collectives_come_back(tmp_path: Path) -> None:
    path = tmp_path / "latency.db"
    models = [
        vidur_fixture.fixture_model(
            path,
            vidur_fixture.with_all_reduce(),
            config=shim_fixture.configuration(shim_fixture.LLAMA, degree),
        )
        for degree in (1, 2)
    ]
    get_exporter("vidur").export(models, tmp_path / "old", SMALL)
    again = imported(tmp_path / "old", "vidur", tmp_path / "imported.db")
    assert any(o.signature.name == "vidur::all_reduce" for o in again[1].occurrences)
    get_exporter("vidur").export(again, tmp_path / "new", {})
    assert max(differences(tmp_path / "old", tmp_path / "new", unread=("emb",))) < 0.01


# -- what it says of a step ---------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_what_vidur_adds_up(tmp_path: Path, layout: str) -> None:
    """Also those of the database that the export was made of, as Vidur sees it."""
    old = exported(tmp_path, "vidur", shim_fixture.LLAMA, layout=layout, **SMALL)
    measured = shim_fixture.latency_models(tmp_path, shim_fixture.LLAMA)
    models = imported(old, "vidur", tmp_path / "imported.db")
    for before, after in zip(measured, models, strict=True):
        for batch in (Batch.prefill(64), Batch.prefill(512), Batch.prefill(128, 128)):
            assert after.step_us(batch) == pytest.approx(before.step_us(batch), rel=0.01)
        for size in (1, 2, 5, 8):  # in the middle of a KV length's granularity
            batch = Batch.decode(size, 128 - 8)
            assert after.step_us(batch) == pytest.approx(before.step_us(batch), rel=0.01)


def test_steps_are_what_llmservingsim_adds_up(tmp_path: Path) -> None:
    old = exported(tmp_path, "llmservingsim", shim_fixture.LLAMA)
    measured = shim_fixture.latency_models(tmp_path, shim_fixture.LLAMA)
    models = imported(old, "llmservingsim", tmp_path / "imported.db")
    mixed = Batch((Request(128, 0), Request(1, 256), Request(1, 256)))
    for before, after in zip(measured, models, strict=True):
        for batch in (Batch.prefill(64), Batch.decode(8, 512), mixed):
            assert after.step_us(batch) == pytest.approx(before.step_us(batch), rel=0.01)


# -- what is in the database --------------------------------------------------


def test_an_import_is_kept_apart(tmp_path: Path) -> None:
    old = exported(tmp_path, "vidur", shim_fixture.LLAMA, **SMALL)
    database = next(tmp_path.glob("*.db"))  # the one that it was measured into
    with Database.open(database, read_only=True) as opened:
        measured = set(opened.signatures())
    profiles = get_importer("vidur").read(old, Wanted())
    with Database.open(database) as opened:
        first, second = store(opened, profiles), store(opened, profiles)
        environments = list(opened.environments().values())
        signatures = opened.signatures()
    assert first.points > 1000
    assert second.points == 0
    assert [e.engine for e in environments] == ["vllm", "vidur"]
    facts = environments[1].facts
    assert facts["imported_from"] == "vidur"
    assert set(facts["files"]) == {f for f in facts["files"] if (old / f).is_file()} != set()
    new = set(signatures) - measured
    assert len(new) == first.signatures
    assert all('"origin":"imported from vidur"' in signatures[hash].canonical for hash in new)


def test_the_command(dooly: Dooly, tmp_path: Path) -> None:
    exported(tmp_path, "vidur", shim_fixture.LLAMA, **SMALL)
    result = dooly("import", "--from", "vidur", "old", "--db", "new.db", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [c["tensor_parallel"] for c in found["configurations"]] == [1, 2]
    assert found["points"] > 1000
    again = dooly("import", "--from", "vidur", "old", "--db", "new.db")
    assert "tp2 on fixture_cpu" in again.stdout
    assert " 0 new points in new.db" in again.stdout
    assert "note: emb" in again.stderr
    assert "vidur repo" in dooly("db", "info", "--db", "new.db").stdout


def test_importers_are_found() -> None:
    assert {"vidur", "llmservingsim"} <= set(importer_names())
    with pytest.raises(InputError, match=r"unknown import format 'vidor': known are .*vidur"):
        get_importer("vidor")


# -- Vidur's own tables -------------------------------------------------------


def edit(path: Path, change: Callable[[dict[str, str]], dict[str, str] | None]) -> None:
    """Change or drop the rows of a table in place."""
    with path.open(newline="") as file:
        rows = [new for row in csv.DictReader(file) if (new := change(row))]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def table(folder: Path, name: str) -> Path:
    return next(folder.rglob(name))


@pytest.fixture
def vidurs(tmp_path: Path) -> Path:
    """Tables as Vidur's profiler writes them: no copies, lengths before the step, enumerations."""
    old = exported(tmp_path, "vidur", shim_fixture.LLAMA, **SMALL)
    for path in old.rglob("*.csv"):
        if path.read_text().count("\n") > 1:
            edit(path, lambda row: {k: v for k, v in row.items() if k != "copy"})
    written = {
        "attention_backend": "AttentionBackend.FLASH_ATTENTION",
        "profile_method": "ProfileMethod.KINETO",
    }
    edit(table(old, "attention.csv"), lambda row: row | written)
    return Path(shutil.copytree(old / "data", tmp_path / "vidur" / "data"))


def test_lengths_of_vidurs_own_rows(vidurs: Path, tmp_path: Path) -> None:
    (profile, _) = get_importer("vidur").read(vidurs, Wanted())
    assert profile.configuration.backend == "FLASH_ATTENTION"
    with table(vidurs, "attention.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["num_tensor_parallel_workers"] == "1"]
    keys = {m.point.key for ms in profile.measurements.values() for m in ms}
    for row in rows[:: len(rows) // 50]:
        size, chunk, length = (
            int(row[name]) for name in ("batch_size", "prefill_chunk_size", "kv_cache_size")
        )
        batch = Batch.prefill(chunk, length) if chunk else Batch.decode(size, length)
        assert f"batch={batch.key}" in keys


def test_cache_writes_are_counted(vidurs: Path, tmp_path: Path) -> None:
    before = imported(vidurs, "vidur", tmp_path / "before.db")[0]
    edit(
        table(vidurs, "attention.csv"),
        lambda row: {**row, "time_stats.attn_kv_cache_save.median": "0.5"},
    )
    after = imported(vidurs, "vidur", tmp_path / "after.db")[0]
    batch = Batch.prefill(256)
    assert after.step_us(batch) - before.step_us(batch) == pytest.approx(32 * 500)


def test_a_model_whose_layers_are_not_known(vidurs: Path, tmp_path: Path) -> None:
    model = table(vidurs, "mlp.csv").parent
    model.rename(model.with_name("unheard"))
    with pytest.raises(InputError, match=r"how many layers meta-llama/unheard has.*--config"):
        get_importer("vidur").read(vidurs, Wanted())
    config = load_model(shim_fixture.LLAMA)
    profiles = get_importer("vidur").read(vidurs, Wanted(config=config))
    assert profiles[0].configuration.num_layers == 32
    with pytest.raises(InputError, match="hidden size"):
        get_importer("vidur").read(vidurs, Wanted(config=load_model("Qwen/Qwen3-0.6B")))


def test_collectives_of_several_networks(vidurs: Path) -> None:
    network = vidurs / "profiling" / "network"
    shutil.copytree(network / "fixture_cpu_node", network / "fixture_cpu_ring")
    with pytest.raises(InputError, match=r"several networks .*choose one with --network"):
        get_importer("vidur").read(vidurs, Wanted())
    chosen = get_importer("vidur").read(vidurs, Wanted(networks=("fixture_cpu_ring",)))
    assert len(chosen) == 2
    shutil.rmtree(network)
    (_, second) = get_importer("vidur").read(vidurs, Wanted())
    assert any("no all_reduce of 2 devices" in note for note in second.notes)


# -- wrong input --------------------------------------------------------------


def spoil(folder: Path, how: str) -> None:
    """Damage an export's tables in one way."""
    name, _, what = how.partition(": ")
    path = table(folder, name)
    if what == "gone":
        path.unlink()
    elif what == "junk":
        path.write_bytes(b"\x00\xff" * 100)
    elif what.startswith("without "):
        gone = what.removeprefix("without ")
        edit(path, lambda row: {k: v for k, v in row.items() if k != gone})
    elif what.startswith("layer "):
        edit(path, lambda row: row if row["layer"] != what.removeprefix("layer ") else None)
    else:
        edit(path, lambda row: {**row, "humidity": "1"})


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("vidur", "attention.csv: gone", r"attention.csv is missing"),
        ("vidur", "mlp.csv: gone", r"mlp.csv is missing"),
        ("vidur", "mlp.csv: junk", r"mlp.csv (cannot be read|has)"),
        ("vidur", "mlp.csv: more", "column that is not known: humidity"),
        ("vidur", "attention.csv: without kv_cache_size", "no column kv_cache_size"),
        ("llmservingsim", "attention.csv: gone", "tp1/attention.csv is missing"),
        ("llmservingsim", "meta.yaml: gone", "meta.yaml is missing"),
        ("llmservingsim", "dense.csv: more", "column that is not known: humidity"),
        ("llmservingsim", "dense.csv: without tokens", "no column tokens"),
        ("llmservingsim", "dense.csv: layer down_proj", "no layer 'down_proj'"),
        ("llmservingsim", "per_sequence.csv: layer lm_head", "no layer 'lm_head'"),
    ],
)
def test_damaged_tables(tmp_path: Path, dooly: Dooly, name: str, how: str, message: str) -> None:
    options = SMALL if name == "vidur" else {}
    spoil(exported(tmp_path, name, shim_fixture.LLAMA, **options), how)
    result = dooly("import", "--from", name, "old", "--db", "new.db")
    assert result.returncode == 2, result.stderr
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr)
    assert re.search(message, result.stderr)
    assert not (tmp_path / "new.db").exists()


@pytest.mark.parametrize("name", ["vidur", "llmservingsim"])
def test_folders_without_tables(tmp_path: Path, name: str) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InputError, match=r"^[^\n]+$"):
            get_importer(name).read(folder, Wanted())
    old = exported(tmp_path, name, shim_fixture.LLAMA)
    with pytest.raises(InputError, match=r"^[^\n]+$"):
        get_importer(name).read(old, Wanted(model="unheard"))


def test_a_packed_table_that_ends_early(tmp_path: Path) -> None:
    old = exported(tmp_path, "vidur", shim_fixture.LLAMA, layout="pypi", **SMALL)
    path = table(old, "mlp.csv.xz")
    path.write_bytes(lzma.compress(b"time_stats.emb.median\n" * 1000)[:-20])
    with pytest.raises(InputError, match=r"mlp.csv.xz cannot be read: [^\n]+$"):
        get_importer("vidur").read(old, Wanted())
