"""LLMServingSim's rules over exported tables give the steps that the database gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import shim_fixture as fixture
from llmservingsim_helpers import (
    MODELS,
    export,
    rules_of,
    tables_of,
)

from dooly_backend.database import Database
from dooly_backend.database.records import Measurement
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch, WorkloadPoint
from shims.common import random_batches


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[LatencyModel]]:
    folder = tmp_path_factory.mktemp("databases")
    return {model: fixture.latency_models(folder, model) for model in MODELS}


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
