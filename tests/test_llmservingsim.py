"""The LLMServingSim export without LLMServingSim: models, tables, files and sums."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shim_fixture as fixture
import yaml

from dooly_backend.database import Database
from dooly_backend.database.records import Measurement
from dooly_backend.errors import InputError
from dooly_backend.exporters import get_exporter
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch, WorkloadPoint
from shims.common import random_batches
from shims.llmservingsim import LLMServingSimExporter
from shims.llmservingsim.architecture import architecture_of
from shims.llmservingsim.costs import LayerCosts
from shims.llmservingsim.grids import choose_grids, doubling, token_grid
from shims.llmservingsim.mapping import COLLECTIVE, STEP, assign
from shims.llmservingsim.options import LLMServingSimOptions
from shims.llmservingsim.rules import LLMServingSimRules
from shims.llmservingsim.tables import DegreeTables, build_tables
from shims.times import axes_of

MODELS = (fixture.LLAMA, fixture.QWEN3, fixture.MIXTRAL, fixture.QWEN3_MOE)
PERF = "profiler/perf/FIXTURECPU/meta-llama/Llama-3.1-8B/bf16"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[LatencyModel]]:
    folder = tmp_path_factory.mktemp("databases")
    return {model: fixture.latency_models(folder, model) for model in MODELS}


def export(models: list[LatencyModel], out: Path, **options: Any) -> dict[str, Any]:
    return LLMServingSimExporter().export(models, out, options)


def tables_of(
    models: list[LatencyModel], **options: Any
) -> tuple[list[LayerCosts], dict[int, DegreeTables]]:
    architecture = architecture_of(models[0].configuration, models[0].occurrences)
    costs = [LayerCosts(model, architecture) for model in models]
    axes = axes_of(models)
    grids = choose_grids(axes, LLMServingSimOptions(**options))
    return costs, build_tables(costs, grids, axes)


def rules_of(costs: LayerCosts, tables: dict[int, DegreeTables]) -> LLMServingSimRules:
    return LLMServingSimRules(tables, costs.architecture, costs.layers, costs.degree)


def changed(latency: LatencyModel, **values: Any) -> LatencyModel:
    return replace(latency, configuration=replace(latency.configuration, **values))


def with_config(model: LatencyModel, **values: Any) -> LatencyModel:
    config = {**model.configuration.hf_config, **values}
    return changed(model, hf_config={k: v for k, v in config.items() if v is not None})


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -- sums ---------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_steps_add_up_at_random_points(models: dict[str, list[LatencyModel]], name: str) -> None:
    all_costs, tables = tables_of(models[name])
    for costs in all_costs:
        rules = rules_of(costs, tables)
        for batch in random_batches(50, max_tokens=512, max_seqs=16, max_length=1024, seed=7):
            expected = costs.model.step_us(batch)
            assert rules.step_us(batch) == pytest.approx(expected, rel=0.01), batch.key


def test_every_layer_has_rows(models: dict[str, list[LatencyModel]]) -> None:
    for name in MODELS:
        all_costs, tables = tables_of(models[name])
        for rows in tables.values():
            found = {row[0] for row in (*rows.dense, *rows.per_sequence)}
            found |= {"attention"} if rows.attention else set()
            found |= {"moe"} if rows.moe else set()
            assert found == set(all_costs[0].architecture.layers)


def test_collectives_stay_out_of_the_tables(tmp_path: Path) -> None:
    operation = fixture.operations(fixture.LLAMA)[0]
    collective = replace(operation, path="model.layers.*", name="vllm::all_reduce", per_layer=True)
    operations = (*fixture.operations(fixture.LLAMA), collective)
    model = fixture.vidur_fixture.fixture_model(
        tmp_path / "a.db", operations, config=fixture.configuration(fixture.LLAMA, 2)
    )
    [costs], tables = tables_of([model])
    batch = Batch.prefill(100)
    expected = model.step_us(batch) - costs.collectives_us(batch)
    assert costs.collectives_us(batch) > 0
    assert rules_of(costs, tables).step_us(batch) == pytest.approx(expected, rel=0.001)
    notes = export([model], tmp_path / "out")["approximations"]
    assert any("link_bw" in note for note in notes)


def test_norms_and_samplers_that_differ_by_degree_are_carried(tmp_path: Path) -> None:
    """The simulator reads them from tp1, also where tp2 measured others."""
    operations = tuple(replace(o, divided=True) for o in fixture.operations(fixture.QWEN3))
    models = [
        fixture.vidur_fixture.fixture_model(
            tmp_path / "a.db", operations, config=fixture.configuration(fixture.QWEN3, degree)
        )
        for degree in (1, 2)
    ]
    all_costs, tables = tables_of(models)
    rules = rules_of(all_costs[1], tables)
    for batch in random_batches(50, max_tokens=512, max_seqs=16, max_length=1024):
        assert rules.step_us(batch) == pytest.approx(models[1].step_us(batch), rel=0.01)


def test_a_step_that_costs_less_at_a_higher_degree(tmp_path: Path) -> None:
    """The sampler is read from tp1, so what only tp1 costs has to be elsewhere."""
    models = fixture.latency_models(tmp_path, fixture.LLAMA)
    cost = models[1].step_cost
    assert cost is not None
    models[1] = replace(models[1], step_cost=replace(cost, step_us=10.0, layer_us=1.0))
    all_costs, tables = tables_of(models)
    for costs in all_costs:
        rules = rules_of(costs, tables)
        for batch in random_batches(50, max_tokens=512, max_seqs=16, max_length=1024):
            expected = costs.model.step_us(batch)
            assert rules.step_us(batch) == pytest.approx(expected, rel=0.01), batch.key


def test_measured_mixed_batches_win(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    model = fixture.latency_model(path, fixture.LLAMA)
    batch = Batch.parse("1x128+0,8x1+256")
    attention = next(o for o in model.occurrences if o.signature.kind == "batch")
    with Database.open(path) as database:
        point = WorkloadPoint.of("batch", batch)
        database.record(attention.signature, 1, Measurement(point, (5e4,)), 1)
        model = LatencyModel.load(database, fixture.LLAMA)
    [costs], tables = tables_of([model])
    assert (128, 0, 8, 256, 5e4) in tables[1].attention
    assert rules_of(costs, tables).step_us(batch) == pytest.approx(model.step_us(batch), rel=1e-4)


@pytest.mark.parametrize("name", [fixture.MIXTRAL, fixture.QWEN3_MOE])
def test_experts_that_were_measured_by_their_routing(tmp_path: Path, name: str) -> None:
    models = fixture.latency_models(tmp_path, name, by_routing=True)
    all_costs, tables = tables_of(models)
    for costs in all_costs:
        rules = rules_of(costs, tables)
        for batch in random_batches(50, max_tokens=512, max_seqs=16, max_length=1024):
            # A rank of two computes a part of the tokens: steps of few share a place.
            near = 0.01 if costs.degree == 1 or batch.num_tokens > 8 else 0.03
            expected = costs.step_us(batch)
            assert rules.step_us(batch) == pytest.approx(expected, rel=near), batch.key
        # At many tokens all experts fire, whoever routes: the latency model's own step.
        batch = Batch.prefill(500)
        assert rules.step_us(batch) == pytest.approx(costs.model.step_us(batch), rel=0.01)
    _, tables = tables_of(models[:1])
    active = {row[1] for row in tables[1].moe}
    experts, top_k = all_costs[0].architecture.experts, all_costs[0].architecture.experts_per_token
    assert (min(active), max(active)) == (top_k, experts)
    manifest = export(models, tmp_path / "out")
    assert abs(manifest["conservation"]["1"]["mixed"]["worst_percent"]) < 1
    assert any("random draws" in note for note in manifest["approximations"])


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
