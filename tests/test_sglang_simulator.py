"""The SGLang Simulator export, read as its predictors read it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import joblib
import pytest
import shim_fixture as fixture

from dooly_backend.errors import InputError
from dooly_backend.exporters import get_exporter
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch
from shims.common import random_batches
from shims.sglang_simulator import SGLangSimulatorExporter
from shims.sglang_simulator.features import FEATURES, features_of

#: Its FEATURE_NAMES, which it compares with what a bundle says.
CONTRACT = [
    "batch_size",
    "sum_extend",
    "max_extend",
    "min_extend",
    "sum_past",
    "max_past",
    "min_past",
    "sum_extend_x_past",
    "sum_extend_squared",
    "sum_past_squared",
    "sum_attn_flops",
    "sum_extend_x_max_past",
    "log1p_sum_past",
    "log1p_sum_attn_flops",
    "batch_size_x_sum_extend",
    "max_past_minus_min_past",
    "is_decode",
    "is_prefill",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[LatencyModel]:
    return fixture.latency_models(tmp_path_factory.mktemp("databases"), fixture.LLAMA)


@pytest.fixture(scope="module")
def exported(
    models: list[LatencyModel], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("export") / "out"
    return out, export(models, out)


def export(models: list[LatencyModel], out: Path, **options: Any) -> dict[str, Any]:
    return SGLangSimulatorExporter().export(models, out, options)


def test_the_features_are_the_contract() -> None:
    assert list(FEATURES) == CONTRACT
    found = dict(zip(FEATURES, features_of(Batch.parse("1x8+0,2x1+100")), strict=True))
    assert found["batch_size"] == 3
    assert found["sum_extend"] == 10
    assert (found["max_past"], found["min_past"], found["sum_past"]) == (100, 0, 200)
    assert found["sum_attn_flops"] == 8 * 4 + 2 * 100.5
    assert (found["is_decode"], found["is_prefill"]) == (0, 1)
    assert features_of(Batch.decode(2, 5))[-2:] == [1, 0]


def test_the_model_predicts_whole_steps(
    models: list[LatencyModel], exported: tuple[Path, dict[str, Any]]
) -> None:
    out, manifest = exported
    for model in models:
        degree = model.configuration.tensor_parallel
        entry = manifest["predictors"][str(degree)]["ml"]
        assert entry["held_out_mape_percent"] < 1.5
        bundle = joblib.load(out / entry["file"])
        assert list(bundle["features"]) == CONTRACT
        limits = manifest["ranges"]
        batches = random_batches(60, **limits, seed=99, prefills=4)
        errors = [
            100 * abs(float(bundle["model"].predict([features_of(b)])[0]) * 1e6 / us - 1)
            for b, us in ((b, model.step_us(b)) for b in batches)
        ]
        assert statistics.fmean(errors) < 1.5


def test_the_model_needs_scikit_learn_alone(exported: tuple[Path, dict[str, Any]]) -> None:
    out, manifest = exported
    content = (out / manifest["predictors"]["1"]["ml"]["file"]).read_bytes()
    assert b"dooly" not in content
    assert b"shims" not in content
    assert set(manifest["pickled_with"]) == {"joblib", "numpy", "sklearn"}


def test_the_table_holds_steps_of_the_database(
    models: list[LatencyModel], exported: tuple[Path, dict[str, Any]]
) -> None:
    out, manifest = exported
    for model in models:
        degree = model.configuration.tensor_parallel
        file = manifest["predictors"][str(degree)]["replay"]["file"]
        table = json.loads((out / file).read_text())
        for key, seconds in table.items():
            pairs = json.loads(key)
            assert key == json.dumps(sorted(pairs))  # as the simulator looks it up
            batch = Batch.parse(",".join(f"{extend}+{past}" for extend, past in pairs))
            assert 1e6 * seconds == pytest.approx(model.step_us(batch), rel=1e-9)
        assert "[[1, 64], [1, 64]]" in table


def test_configurations_name_their_predictor(exported: tuple[Path, dict[str, Any]]) -> None:
    out, _ = exported
    for name in ("ml", "replay"):
        content = json.loads((out / f"tp2/simulator_{name}.json").read_text())
        assert content["predictor"]["name"] == name
        assert (out / "tp2" / content["predictor"]["database_path"]).is_file()
        assert content["scheduler"]["tp_size"] == 2


def test_one_predictor_alone(models: list[LatencyModel], tmp_path: Path) -> None:
    manifest = export(models[:1], tmp_path / "out", predictor="replay")
    assert set(manifest["predictors"]["1"]) == {"replay"}
    assert not list((tmp_path / "out").rglob("*.pkl"))


def test_repeated_exports_are_equal(
    models: list[LatencyModel], exported: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    assert export(models, tmp_path / "out")["digest"] == exported[1]["digest"]
    other = export(models, tmp_path / "other", seed=1)
    assert other["digest"] != exported[1]["digest"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"predictor": "aic"}, "predictor must be ml or replay"),
        ({"sample": 500}, "did you mean samples"),
        ({"samples": 3}, "whole number from 200"),
        ({"max_tokens": 1}, "whole number from 2"),
        ({"hardware": "h200"}, "must be a mapping"),
    ],
)
def test_wrong_options(
    models: list[LatencyModel], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        export(models, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_refused(models: list[LatencyModel], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"notes\.txt"):
        export(models, tmp_path, predictor="replay")


def test_the_exporter_is_found() -> None:
    assert get_exporter("sglang-simulator").name == "sglang-simulator"
