"""LLMServingSim's own loader, look-ups and trace generator on our exports.

They come from the checkout that LLMSERVINGSIM_REPO names.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import shim_fixture as fixture
from click.testing import CliRunner

from dooly_backend.exporters import get_exporter
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch
from integration.llmservingsim import run
from shims.common import random_batches
from shims.llmservingsim.architecture import architecture_of
from shims.llmservingsim.costs import LayerCosts
from shims.llmservingsim.mapping import TP_STABLE
from shims.llmservingsim.routing import Routing
from shims.llmservingsim.tables import carrier

CHECKOUT = os.environ.get(run.CHECKOUT_VARIABLE)
if not CHECKOUT:
    pytest.skip(
        f"needs LLMServingSim: set {run.CHECKOUT_VARIABLE} to a clone of casys-kaist/LLMServingSim",
        allow_module_level=True,
    )

#: Rows of its trace when no layer is skipped: at tp2 a sparse block has two more, for its rank.
ROWS = {
    (fixture.LLAMA, 1): 292,
    (fixture.LLAMA, 2): 292,
    (fixture.QWEN3, 1): 364,
    (fixture.QWEN3, 2): 364,
    (fixture.MIXTRAL, 1): 292,
    (fixture.MIXTRAL, 2): 356,
    (fixture.QWEN3_MOE, 1): 484,
    (fixture.QWEN3_MOE, 2): 580,
}
#: On its grid and off it.
TOKENS, SEQUENCES = (1, 16, 37, 100, 128, 333, 512), (1, 3, 8, 13, 16)
ATTENTION = (
    (128, 0, 0, 0),
    (100, 77, 0, 0),
    (0, 0, 8, 512),
    (0, 0, 5, 333),
    (128, 128, 8, 256),
    (90, 200, 3, 100),
)


@pytest.fixture(scope="module")
def exported(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[list[LatencyModel], Path]]:
    found = {}
    for name in (fixture.LLAMA, fixture.QWEN3, fixture.MIXTRAL, fixture.QWEN3_MOE):
        folder = tmp_path_factory.mktemp("export")
        models = fixture.latency_models(folder, name)
        get_exporter("llmservingsim").export(models, folder / "out", {})
        found[name] = models, folder / "out"
    return found


@pytest.mark.parametrize(("name", "degree"), ROWS)
def test_its_own_code_reads_what_the_database_says(
    exported: dict[str, tuple[list[LatencyModel], Path]], name: str, degree: int
) -> None:
    models, out = exported[name]
    model = models[degree - 1]
    costs = LayerCosts(model, architecture_of(model.configuration, model.occurrences))
    lookups, expected = questions(costs, LayerCosts(models[0], costs.architecture))
    steps = random_batches(12, max_tokens=512, max_seqs=16, max_length=1024, seed=degree)
    answers = run.ask(out, Path(CHECKOUT or ""), degree, lookups, steps)
    assert answers.available == [1, 2]
    assert set(answers.layers) == set(costs.architecture.layers) - {"attention", "moe"}
    assert answers.kv_blocks > 0
    for lookup, got, us in zip(lookups, answers.lookups, expected, strict=True):
        assert got / 1e3 == pytest.approx(us, rel=0.01), lookup
    for batch, trace in zip(steps, answers.traces, strict=True):
        assert trace["rows"] == ROWS[name, degree]
        assert trace["ns"] / 1e3 == pytest.approx(model.step_us(batch), rel=0.01), batch.key


def questions(costs: LayerCosts, first: LayerCosts) -> tuple[list[run.Lookup], list[float]]:
    """Look-ups of every layer, and the database's microseconds for them."""
    asked: list[tuple[run.Lookup, float]] = []
    carried = "qk_norm" in costs.architecture.layers and costs.degree > 1
    for layer in costs.architecture.dense_layers:
        if carried and layer == carrier(costs.architecture):
            continue  # holds what the divided QK-norm, read from tp1, costs less here
        read = first if layer in TP_STABLE else costs
        asked += [(("dense", [layer, n]), read.dense(layer, n).us) for n in TOKENS]
    for n in SEQUENCES:
        asked.append((("per_sequence", ["lm_head", n]), costs.lm_head(n).us))
        asked.append((("per_sequence", ["sampler", n]), costs.sampler(n).us))
    asked += [(("attention", list(place)), costs.attention(*place).us) for place in ATTENTION]
    if costs.architecture.experts:  # of the smallest degree, whatever the degree
        experts, each = costs.architecture.experts, costs.architecture.experts_per_token
        asked += [(("moe", [n, min(experts, n * each)]), first.dense("moe", n).us) for n in TOKENS]
    return [lookup for lookup, _ in asked], [us for _, us in asked]


def test_its_own_code_reads_experts_by_their_routing(tmp_path: Path) -> None:
    models = fixture.latency_models(tmp_path, fixture.QWEN3_MOE, by_routing=True)
    architecture = architecture_of(models[0].configuration, models[0].occurrences)
    first, second = (LayerCosts(model, architecture) for model in models)
    places = [(n, a) for n in TOKENS for a in (8, 20, 64, 100, 128) if a <= 8 * n]
    exporter = get_exporter("llmservingsim")
    exporter.export(models[:1], tmp_path / "one", {})
    answers = ask_experts(tmp_path / "one", 1, places)
    for place, ns in zip(places, answers, strict=True):
        assert ns / 1e3 == pytest.approx(first.sparse(*place).us, rel=0.01), place
    # With both degrees exported, each at the places where the simulator looks for it.
    exporter.export(models, tmp_path / "both", {})
    for costs, routing in ((first, Routing(128, 8, 1)), (second, Routing(128, 8, 2))):
        places = [(routing.tokens(n), routing.active(n)) for n in TOKENS]
        answers = ask_experts(tmp_path / "both", costs.degree, places)
        for tokens, ns in zip(TOKENS, answers, strict=True):
            assert ns / 1e3 == pytest.approx(costs.routed(tokens).us, rel=0.01), tokens


def ask_experts(out: Path, degree: int, places: list[tuple[int, int]]) -> list[int]:
    lookups: list[run.Lookup] = [("moe", list(place)) for place in places]
    return run.ask(out, Path(CHECKOUT or ""), degree, lookups).lookups


def test_twice_the_times_is_twice_the_step(
    exported: dict[str, tuple[list[LatencyModel], Path]], tmp_path: Path
) -> None:
    models, _ = exported[fixture.LLAMA]
    operations = tuple(
        fixture.replace(o, fixed=2 * o.fixed, each=2 * o.each)
        for o in fixture.operations(fixture.LLAMA)
        if o.kind != "batch"
    )
    attention = tuple(o for o in fixture.operations(fixture.LLAMA) if o.kind == "batch")
    doubled = fixture.vidur_fixture.fixture_model(
        tmp_path / "a.db", operations + attention, config=fixture.configuration(fixture.LLAMA)
    )
    get_exporter("llmservingsim").export([doubled], tmp_path / "out", {})
    batch = Batch.prefill(128)
    answers = run.ask(tmp_path / "out", Path(CHECKOUT or ""), 1, steps=[batch])
    [trace] = answers.traces
    assert trace["ns"] / 1e3 == pytest.approx(doubled.step_us(batch), rel=0.01)
    assert doubled.step_us(batch) > 1.5 * models[0].step_us(batch)


def test_the_command(exported: dict[str, tuple[list[LatencyModel], Path]]) -> None:
    _, out = exported[fixture.LLAMA]
    done = CliRunner().invoke(run.main, [str(out), "--tp", "2", "--json"])
    assert done.exit_code == 0, done.output
    assert '"trace_rows": [292, 292]' in done.output
