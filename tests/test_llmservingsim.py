"""The LLMServingSim export without LLMServingSim: models, tables, files and sums."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shim_fixture as fixture
import yaml
from llmservingsim_helpers import (
    MODELS,
    PERF,
    changed,
    export,
    rows_of,
    tables_of,
    with_config,
)

from dooly_backend.errors import InputError
from dooly_backend.exporters import get_exporter
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch
from shims.llmservingsim.grids import choose_grids, doubling, token_grid
from shims.llmservingsim.mapping import COLLECTIVE, STEP, assign
from shims.llmservingsim.options import LLMServingSimOptions
from shims.times import axes_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[LatencyModel]]:
    folder = tmp_path_factory.mktemp("databases")
    return {model: fixture.latency_models(folder, model) for model in MODELS}


# -- tables -------------------------------------------------------------------


def test_layers_are_where_the_operations_say(models: dict[str, list[LatencyModel]]) -> None:
    homes = {
        assignment.occurrence.path.rpartition(".")[2]: assignment.home
        for model in MODELS
        for assignment in assign(models[model][0].occurrences)
        if assignment.occurrence.path
    }
    assert homes == {
        "embed_tokens": "embedding",
        "input_layernorm": "layernorm",
        "qkv_proj": "qkv_proj",
        "q_norm": "qk_norm",
        "k_norm": "qk_norm",
        "self_attn": "rotary_emb",
        "rotary_emb": "rotary_emb",
        "attn": "attention",
        "o_proj": "o_proj",
        "post_attention_layernorm": "layernorm",
        "gate_up_proj": "gate_up_proj",
        "act_fn": "act_fn",
        "down_proj": "down_proj",
        "gate": "moe",
        "experts": "moe",
        "*": "layernorm",
        "norm": "final_layernorm",
        "logits_processor": "lm_head",
        "sampler": "sampler",
    }
    assert {COLLECTIVE, STEP}.isdisjoint(homes.values())


def test_rows_at_measured_points_are_exact(models: dict[str, list[LatencyModel]]) -> None:
    [model, _] = models[fixture.LLAMA]
    [costs], tables = tables_of([model])
    dense = {(layer, tokens): us for layer, tokens, us in tables[1].dense}
    [qkv] = costs.of_home("qkv_proj")
    for tokens in fixture.vidur_fixture.TOKENS:
        exact = model.occurrence(qkv, Batch.prefill(tokens)).median_us
        assert dense["qkv_proj", tokens] == pytest.approx(exact, rel=1e-12)
    assert set(fixture.vidur_fixture.CHUNKS) <= {row[0] for row in tables[1].attention}
    assert tables[1].sources["attention"]["measured"] > 0


def test_no_pair_of_a_chunk_and_a_size_is_missing(models: dict[str, list[LatencyModel]]) -> None:
    _, tables = tables_of(models[fixture.LLAMA])
    pairs = {(row[0], row[2]) for row in tables[1].attention}
    chunks, sizes = ({pair[axis] for pair in pairs} for axis in (0, 1))
    assert pairs == {(c, s) for c in chunks for s in sizes} - {(0, 0)}


def test_a_row_limit_keeps_what_was_measured(models: dict[str, list[LatencyModel]]) -> None:
    [model, _] = models[fixture.LLAMA]
    few = choose_grids(axes_of([model]), LLMServingSimOptions(max_rows=700)).attention
    assert few.rows <= 700
    assert set(fixture.vidur_fixture.CHUNKS) <= set(few.chunks)
    assert set(fixture.vidur_fixture.CONTEXTS) <= set(few.contexts)


def test_tables_end_where_measurements_or_options_do(
    models: dict[str, list[LatencyModel]],
) -> None:
    axes = axes_of(models[fixture.LLAMA])
    whole = choose_grids(axes, LLMServingSimOptions(max_tokens=10**6))
    assert (whole.max_tokens, whole.max_seqs, whole.max_kv) == (512, 16, 1023)
    part = choose_grids(axes, LLMServingSimOptions(max_tokens=100, max_seqs=6, max_kv=300))
    assert (part.max_tokens, part.max_seqs, part.max_kv) == (100, 6, 300)


def test_grids_of_its_own_profiler() -> None:
    assert len(token_grid(2048)) == 152
    assert token_grid(64)[-2:] == [60, 64]
    assert doubling(2048, 16) == [16, 32, 64, 128, 256, 512, 1024, 2048]
    assert doubling(100, 16) == [16, 32, 64, 100]


# -- models -------------------------------------------------------------------


def test_an_unknown_type_brings_its_file(
    models: dict[str, list[LatencyModel]], tmp_path: Path
) -> None:
    model = with_config(models[fixture.LLAMA][0], model_type="mistral")
    manifest = export([model], tmp_path / "out")
    described = yaml.safe_load((tmp_path / "out/profiler/models/mistral.yaml").read_text())
    named = {n for part in described["sequence"].values() for n in part}
    assert named == {n for part in described["catalog"].values() for n in part}
    assert any("mistral" in note for note in manifest["approximations"])
    export(models[fixture.LLAMA], tmp_path / "known")
    assert not (tmp_path / "known/profiler/models").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": None}, "no usable model_type"),
        ({"model_type": "mixtral"}, "engine runs none"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"is_encoder_decoder": True}, "no encoder"),
        ({"hidden_size": None}, "no hidden_size"),
    ],
)
def test_models_that_are_refused(
    models: dict[str, list[LatencyModel]], tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    model = with_config(models[fixture.LLAMA][0], **values)
    with pytest.raises(InputError, match=message):
        export([model], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_without_attention_is_refused(
    models: dict[str, list[LatencyModel]], tmp_path: Path
) -> None:
    model = models[fixture.LLAMA][0]
    kept = tuple(o for o in model.occurrences if o.signature.kind != "batch")
    with pytest.raises(InputError, match="no attention over a KV cache"):
        export([replace(model, occurrences=kept)], tmp_path / "out")


def test_models_that_do_not_belong_together(
    models: dict[str, list[LatencyModel]], tmp_path: Path
) -> None:
    [model, second] = models[fixture.LLAMA]
    for others, message in (
        ([changed(second, model="other")], "one model"),
        ([changed(second, backend="FLASHINFER")], "one backend"),
        ([model], "must differ"),
        ([changed(second, pipeline_parallel=2)], "pipeline_parallel 1"),
    ):
        with pytest.raises(InputError, match=message):
            export([model, *others], tmp_path / "out")
    with pytest.raises(InputError, match="at least one model"):
        export([], tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_token": 5}, "did you mean max_tokens"),
        ({"max_seqs": 0}, "whole number from 1"),
        ({"max_rows": "many"}, "whole number from 1"),
        ({"hardware": "h200"}, "must be a mapping"),
        ({"hardware": {"memory_gb": "big"}}, "memory_gb must be a number"),
        ({"hardware_name": "a/b"}, "name of a folder"),
    ],
)
def test_wrong_options(
    models: dict[str, list[LatencyModel]], tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        export(models[fixture.LLAMA], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


# -- files --------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_files(models: dict[str, list[LatencyModel]], tmp_path: Path) -> None:
    manifest = export(models[fixture.LLAMA], tmp_path / "out")
    tables = {
        f"{PERF}/tp{degree}/{name}.csv"
        for degree in (1, 2)
        for name in ("dense", "per_sequence", "attention")
    }
    clusters = {
        f"configs/cluster/dooly_FIXTURECPU_Llama-3.1-8B_bf16_tp{degree}.json" for degree in (1, 2)
    }
    config = "configs/model/meta-llama/Llama-3.1-8B.json"
    expected = {*tables, *clusters, config, f"{PERF}/meta.yaml", "manifest.json"}
    assert set(files_of(tmp_path / "out")) == expected
    assert json.loads((tmp_path / "out" / config).read_text())["model_type"] == "llama"
    rows = rows_of(tmp_path / "out" / PERF / "tp1/attention.csv")
    assert list(rows[0]) == ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    assert all(row["time_us"] for row in rows)
    assert json.loads((tmp_path / "out/manifest.json").read_text()) == manifest
    for share in ("decode_percent", "prefill_percent"):
        assert sum(e[share] for e in manifest["folded"]) == pytest.approx(100, abs=0.1)


def test_what_the_meta_file_says(models: dict[str, list[LatencyModel]], tmp_path: Path) -> None:
    export(models[fixture.LLAMA], tmp_path / "out")
    meta = yaml.safe_load((tmp_path / "out" / PERF / "meta.yaml").read_text())
    effective = meta["engine_effective"]
    assert (effective["max_num_batched_tokens"], effective["max_num_seqs"]) == (512, 16)
    assert meta["tp_degrees"] == [1, 2]
    assert meta["vllm_version"] == "0.0-fixture"
    assert meta["gpu"] == "Fixture CPU"
    assert meta["profiled_at"] == models[fixture.LLAMA][1].measured_at
    assert len(meta["architecture_sha256"]) == 64


def test_experts_have_a_table_and_their_cluster(
    models: dict[str, list[LatencyModel]], tmp_path: Path
) -> None:
    manifest = export(models[fixture.QWEN3_MOE], tmp_path / "out", hardware_name="H200")
    perf = tmp_path / "out" / manifest["llmservingsim"]["perf"]
    assert "perf/H200/" in perf.as_posix()
    assert rows_of(perf / "tp1/moe.csv") == rows_of(perf / "tp2/moe.csv")
    cluster = json.loads((tmp_path / "out" / manifest["clusters"]["2"]).read_text())
    assert cluster["nodes"][0]["instances"][0]["ep_size"] == 2


def test_variants(models: dict[str, list[LatencyModel]], tmp_path: Path) -> None:
    model = changed(models[fixture.LLAMA][0], kv_cache_dtype="fp8")
    assert export([model], tmp_path / "out")["llmservingsim"]["variant"] == "bf16-kvfp8"
    fp8 = model.configuration.hf_config | {"dooly_quantization": "fp8"}
    manifest = export([changed(model, hf_config=fp8)], tmp_path / "fp8")
    assert manifest["llmservingsim"]["variant"] == "fp8-kvfp8"
    assert any("weights of linear layers are fp8" in text for text in manifest["approximations"])
    cluster = json.loads((tmp_path / "fp8" / manifest["clusters"]["1"]).read_text())
    assert cluster["nodes"][0]["instances"][0]["dtype"] == "fp8"


def test_repeated_exports_are_equal(models: dict[str, list[LatencyModel]], tmp_path: Path) -> None:
    for name in ("a", "b"):
        export(models[fixture.MIXTRAL], tmp_path / name)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_a_folder_with_other_files_is_refused(
    models: dict[str, list[LatencyModel]], tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"notes\.txt"):
        export(models[fixture.LLAMA], tmp_path)
    assert set(files_of(tmp_path)) == {"notes.txt"}


def test_the_exporter_is_found() -> None:
    assert get_exporter("llmservingsim").name == "llmservingsim"
