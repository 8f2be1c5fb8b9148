"""The Vidur export without Vidur: models, files and folders."""

from __future__ import annotations

import csv
import errno
import json
import lzma
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import vidur_fixture as fixture

from dooly_backend.errors import InputError
from dooly_backend.exporters import exporter_names, get_exporter
from dooly_backend.regression.latency import LatencyModel
from shims import vidur
from shims.common import repository_name
from shims.vidur.mapping import MLP_OPS
from shims.vidur.model import Dimensions, dimensions_of, kv_blocks
from shims.vidur.ranges import LAYOUTS, Layout
from shims.vidur.tables import COPIES


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LatencyModel:
    return fixture.fixture_model(tmp_path_factory.mktemp("vidur") / "latency.db")


def export(model: LatencyModel, out: Path, **options: Any) -> dict[str, Any]:
    return vidur.VidurExporter().export([model], out, options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "hf"}, "layout must be repo or pypi"),
        ({"max_lenght": 5}, "did you mean max_length"),
        ({"max_batch": 0}, "whole number above zero"),
        ({"max_batch": "many"}, "whole number above zero"),
        ({"granularity": 24}, "power of two"),
        ({"max_length": 5000}, "beyond the model's 1024"),
        ({"max_chunk": 16}, "32 or more"),
        ({"hardware": {"memory_gb": "big"}}, "memory_gb must be a number"),
        ({"hardware": "h200"}, "must be a mapping"),
    ],
)
def test_wrong_options(
    model: LatencyModel, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        export(model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# -- models -------------------------------------------------------------------


def test_experts_are_priced_and_named(tmp_path: Path) -> None:
    model = fixture.fixture_model(tmp_path / "a.db", fixture.with_experts())
    manifest = export(model, tmp_path / "out")
    assert any("no experts" in note for note in manifest["approximations"])
    assert abs(manifest["conservation"]["prefill"]["worst_percent"]) < 1


def test_models_that_vidur_refuses(model: LatencyModel, tmp_path: Path) -> None:
    config = model.configuration.hf_config | {"num_attention_heads": 7}
    odd = replace(model, configuration=replace(model.configuration, hf_config=config))
    with pytest.raises(InputError, match="multiple of the attention heads"):
        export(odd, tmp_path / "out")


def test_models_that_do_not_belong_together(model: LatencyModel, tmp_path: Path) -> None:
    def changed(**values: Any) -> LatencyModel:
        return replace(model, configuration=replace(model.configuration, **values))

    exporter = vidur.VidurExporter()
    for others, message in (
        ([changed(model="other", tensor_parallel=2)], "one model"),
        ([changed(backend="FLASHINFER", tensor_parallel=2)], "one backend"),
        ([model], "must differ"),
        ([changed(pipeline_parallel=2, tensor_parallel=2)], "pipeline_parallel 1"),
        (
            [
                replace(
                    changed(tensor_parallel=2),
                    environment=replace(model.environment, device="Other"),
                )
            ],
            "one environment",
        ),
    ):
        with pytest.raises(InputError, match=message):
            exporter.export([model, *others], tmp_path / "out", {})
    with pytest.raises(InputError, match="at least one model"):
        exporter.export([], tmp_path / "out", {})


def test_kv_blocks_of_a_known_device(model: LatencyModel) -> None:
    dimensions = dimensions_of(model.configuration, model.occurrences)
    device = vidur.device_of(model.environment, {"memory_gb": 10, "fp16_tflops": 5}, 1)
    blocks, _ = kv_blocks(model.configuration, dimensions, device)
    assert blocks is not None
    per_block = 2 * 2 * 3 * 64 * 30 * 32  # key and value, bytes, heads, size, layers, tokens
    assert 8.5e9 < blocks * per_block < 9e9
    small = vidur.device_of(model.environment, {"memory_gb": 0.1}, 1)
    with pytest.raises(InputError, match="does not fit"):
        kv_blocks(model.configuration, dimensions, small)


def test_names_in_paths() -> None:
    assert repository_name("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    assert repository_name("/tmp/some folder/my model") == "some-folder/my-model"
    assert repository_name("model") == "local/model"


# -- files --------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeated_exports_are_equal(model: LatencyModel, tmp_path: Path, layout: Layout) -> None:
    export(model, tmp_path / "a", layout=layout)
    export(model, tmp_path / "b", layout=layout)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_files_of_the_repository_layout(model: LatencyModel, tmp_path: Path) -> None:
    export(model, tmp_path)
    compute = "data/profiling/compute/fixture_cpu/fixture/SmolLM-135M"
    assert set(files_of(tmp_path)) == {
        f"{compute}/mlp.csv",
        f"{compute}/attention.csv",
        "data/profiling/network/fixture_cpu_node/all_reduce.csv",
        "data/profiling/network/fixture_cpu_node/send_recv.csv",
        "launch.json",
        "manifest.json",
        "run_vidur.py",
    }
    with (tmp_path / compute / "mlp.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) % COPIES == 0
    assert set(rows[0]) >= {f"time_stats.{op}.std" for op in MLP_OPS}
    assert rows[0]["use_gated_mlp"] == "True"


def test_files_of_the_pypi_layout(model: LatencyModel, tmp_path: Path) -> None:
    export(model, tmp_path, layout="pypi")
    launch = json.loads((tmp_path / "launch.json").read_text())
    for kind, expected in (
        ("compute", {"model": "fixture/SmolLM-135M", "device_sku": "fixture_cpu"}),
        ("network", {"sku": "fixture_cpu_node"}),
    ):
        name = launch["datasets"][kind].replace("/", "--")
        root = tmp_path / "profiling_data" / kind / f"datasets--{name}"
        snapshot = root / "snapshots" / (root / "refs" / "main").read_text()
        assert json.loads((snapshot / "config.json").read_text()) == expected
        for file in snapshot.glob("*.csv.xz"):
            assert lzma.decompress(file.read_bytes()).count(b"\n") >= 1


def test_manifest(model: LatencyModel, tmp_path: Path) -> None:
    manifest = export(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    assert manifest["model"] == "fixture/SmolLM-135M"
    assert manifest["tensor_parallel"] == [1]
    assert (tmp_path / "out" / manifest["command"].split()[-1]).is_file()
    assert set(manifest["files"]) == set(files_of(tmp_path / "out")) - {"manifest.json"}
    folded = manifest["folded"]
    assert len(folded) == len(model.occurrences) + 1  # and the step's own cost
    for share in ("decode_percent", "prefill_percent"):
        assert sum(entry[share] for entry in folded) == pytest.approx(100, abs=0.1)
    for kind in ("prefill", "decode"):
        assert abs(manifest["conservation"][kind]["worst_percent"]) <= 1
    assert set(manifest["cells"]["attention"]) <= {"measured", "interpolated", "extrapolated"}


def test_launcher_needs_nothing_of_this_project(model: LatencyModel, tmp_path: Path) -> None:
    export(model, tmp_path)
    text = (tmp_path / "run_vidur.py").read_text()
    assert not re.search(r"^\s*(import|from) (dooly|shims|numpy|pandas)", text, re.MULTILINE)
    for path, content in files_of(tmp_path).items():
        assert str(tmp_path).encode() not in content, path


# -- folders ------------------------------------------------------------------


def test_an_earlier_export_is_replaced(model: LatencyModel, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(model, out, layout="pypi")
    (out / "cache").mkdir()
    (out / "cache" / "trained.pkl").write_text("by Vidur")
    export(model, out)
    assert not (out / "profiling_data").exists()
    assert not (out / "cache").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["other files", "other manifest", "file beside an export"])
def test_other_peoples_files_are_left_alone(model: LatencyModel, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file beside an export":
        export(model, out)
    out.mkdir(exist_ok=True)
    name = "manifest.json" if kind == "other manifest" else "notes.txt"
    (out / name).write_text("{}")
    before = files_of(out)
    with pytest.raises(InputError, match="files that no export wrote"):
        export(model, out)
    assert files_of(out) == before


def test_a_file_in_the_way(model: LatencyModel, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for out in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(InputError, match=r"^[^\n]+$"):
            export(model, out)
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("earlier", [False, True])
def test_a_full_disk_leaves_nothing_behind(
    model: LatencyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    out = tmp_path / "out"
    if earlier:
        export(model, out)
    before = files_of(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(vidur, "write_launcher", full)
    with pytest.raises(InputError, match="No space left"):
        export(model, out)
    assert files_of(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if earlier else [])


def test_exporters_are_found() -> None:
    assert "vidur" in exporter_names()
    with pytest.raises(InputError, match=r"unknown export format 'vidor': known are .*vidur"):
        get_exporter("vidor")


def test_dimensions_of_a_multimodal_config(model: LatencyModel) -> None:
    config = {"text_config": model.configuration.hf_config, "hidden_size": 1}
    nested = replace(model.configuration, hf_config=config)
    found = dimensions_of(nested, model.occurrences)
    assert isinstance(found, Dimensions)
    assert (found.hidden, found.heads, found.gated) == (576, 9, True)
