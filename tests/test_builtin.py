"""The database that ships with Dooly: measured on an H200, used without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dooly_backend.database import Database
from dooly_backend.database.shipped import shipped_path
from dooly_backend.errors import DatabaseError, InputError
from dooly_backend.exporters import get_exporter
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch

LLAMA = "meta-llama/Llama-3.1-8B"


@pytest.fixture(scope="module")
def models() -> dict[str, LatencyModel]:
    with Database.open("builtin:h200") as database:
        return {
            backend: LatencyModel.load(database, LLAMA, backend=backend)
            for backend in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
        }


def test_it_is_read_only_and_says_where_it_is_from():
    with Database.open("builtin:h200") as database:
        assert database.read_only
        (environment,) = database.environments().values()
        assert environment.device == "NVIDIA H200"
        assert environment.facts["driver"]
        assert all(m.samples_us for s in database.signatures() for m in database.measurements(s, 1))


def test_backends_share_everything_but_attention(models: dict[str, LatencyModel]):
    flash, triton = models["FLASH_ATTN"], models["TRITON_ATTN"]
    differing = {
        occurrence.signature.name
        for occurrence in (*flash.occurrences, *triton.occurrences)
        if not (
            occurrence.signature.hash in flash.signatures
            and occurrence.signature.hash in triton.signatures
        )
    }
    assert differing == {"Attention"}


def test_times_are_of_the_order_that_the_card_can_do(models: dict[str, LatencyModel]):
    # 16 GB of weights at 4.8 TB/s take 3.3 ms; 2 x 7e9 x 2048 FLOP at 0.99 PFLOP/s 29 ms.
    for model in models.values():
        assert 3_300 < model.step_us(Batch.decode(1, 1024)) < 7_000
        assert 29_000 < model.step_us(Batch.prefill(2048)) < 70_000


def test_decodes_take_longer_with_more_context(models: dict[str, LatencyModel]):
    for model in models.values():
        times = [model.step_us(Batch.decode(64, context)) for context in (256, 1024, 4096, 8192)]
        assert times == sorted(times)


@pytest.mark.parametrize(("layout", "exact"), [("repo", "prefill"), ("pypi", "decode")])
def test_it_exports_without_a_gpu(
    models: dict[str, LatencyModel], tmp_path: Path, layout: str, exact: str
):
    small = {"layout": layout, "max_length": "1024", "max_chunk": "256", "max_batch": "16"}
    get_exporter("vidur").export([models["FLASH_ATTN"]], tmp_path / "export", small)
    manifest = json.loads((tmp_path / "export" / "manifest.json").read_text())
    assert manifest["device"] == "NVIDIA H200"
    assert abs(manifest["conservation"][exact]["worst_percent"]) < 1
    assert any("an engine at its defaults" in note for note in manifest["approximations"])


def unpacked(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return shipped_path("h200")


def test_it_is_unpacked_once_for_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = unpacked(monkeypatch, tmp_path)
    assert first.parent == tmp_path / "dooly"
    before = first.stat().st_mtime_ns
    assert unpacked(monkeypatch, tmp_path) == first
    assert first.stat().st_mtime_ns == before
    assert list(first.parent.iterdir()) == [first]
    with Database.open(first, read_only=True) as database:
        assert database.info().measurements > 10_000


def test_where_the_cache_cannot_be_written_it_is_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dooly").write_text("a file where the folder should be")
    path = unpacked(monkeypatch, tmp_path)
    assert tmp_path not in path.parents
    with Database.open(path, read_only=True) as database:
        assert database.info().measurements > 10_000


def test_where_nothing_can_be_written_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = shipped_path("h200").stat().st_size // 2**20 + 1
    (tmp_path / "dooly").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(DatabaseError, match=f"XDG_CACHE_HOME to a folder with {needed} MiB"):
        unpacked(monkeypatch, tmp_path)


def test_an_unknown_name_tells_what_is_shipped() -> None:
    with pytest.raises(InputError, match=r"no built-in database 'h100' \(h200\)"):
        Database.open("builtin:h100")
