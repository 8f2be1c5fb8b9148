"""What each format makes of really measured databases, at 50 random steps.

Steps are those that the format can express; what it cannot is in the export's
manifest, and some of it is tested to be there. The H200's models (`measured.LARGE`) know whole
steps at the engine's defaults, which no sum of rows is: there the kinds of steps that add up must
do so, and tables be nearer to all of them than those without whole steps are.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import joblib
import measured
import pytest

from dooly_backend.exporters import get_exporter
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch, Request
from shims.common import random_batches
from shims.llmservingsim.architecture import architecture_of
from shims.llmservingsim.costs import LayerCosts
from shims.llmservingsim.grids import choose_grids
from shims.llmservingsim.options import LLMServingSimOptions
from shims.llmservingsim.rules import LLMServingSimRules
from shims.llmservingsim.tables import build_tables
from shims.revati.predictor import Predictor
from shims.sglang_simulator.features import features_of
from shims.times import axes_of
from shims.vidur.costs import StepCosts
from shims.vidur.model import dimensions_of
from shims.vidur.options import VidurOptions
from shims.vidur.ranges import CHUNK_STEP, TOKEN_STEP, Layout, Ranges, choose_ranges
from shims.vidur.rules import VidurRules
from shims.vidur.tables import build_tables as build_vidur_tables

POINTS = 50
WITHIN = 0.01
MODELS = (*measured.SMALL, *measured.LARGE)
#: Enough of the H200's ranges for steps of every kind, and quick to write.
LIMITS = {"max_length": 4096, "max_chunk": 1024, "max_batch": 32}


Price = Callable[[Batch], float]  # microseconds


def close(model: LatencyModel, price: Price, batches: list[Batch], us: Price | None = None) -> None:
    """All within 1% of what the database says, or of `us`."""
    expected = us or model.step_us
    assert len(batches) == POINTS
    errors = {batch.key: price(batch) / expected(batch) - 1 for batch in batches}
    worst = max(errors, key=lambda key: abs(errors[key]))
    assert abs(errors[worst]) <= WITHIN, f"{worst}: {100 * errors[worst]:.2f}%"


# -- Vidur --------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["pypi", "repo"])
@pytest.mark.parametrize("name", measured.SMALL)
def test_vidur(name: str, layout: Layout) -> None:
    models = measured.models(name)
    costs = [StepCosts(model) for model in models]
    dimensions = dimensions_of(models[0].configuration, models[0].occurrences)
    ranges = choose_ranges(costs[0], VidurOptions(layout=layout), layout)
    tables = build_vidur_tables(costs, dimensions, ranges, layout)
    for model in models:
        configuration = model.configuration
        rules = VidurRules(
            tables,
            layout,
            ranges.granularity,
            configuration.num_layers,
            configuration.tensor_parallel,
        )
        batches = vidur_steps(ranges, layout, configuration.tensor_parallel)
        close(model, lambda batch, rules=rules: 1e3 * rules.step_ms(batch), batches)


@pytest.mark.parametrize("layout", ["pypi", "repo"])
@pytest.mark.parametrize("name", measured.LARGE)
def test_vidur_prices_whole_steps(name: str, layout: Layout) -> None:
    model = measured.models(name)[0]
    price = vidur_price(model, layout)
    ranges = ranges_of(model, layout)
    batches = [batch for seed in range(6) for batch in vidur_steps(ranges, layout, seed)]
    # The release prices short prefills as if they were launched at once, however many there are.
    shortest = model.configuration.facts["max_num_seqs"] if layout == "pypi" else 0
    exact = [b for b in batches if not b.prefills]
    exact += [b for b in batches if not b.decodes and b.num_reqs == 1 and b.num_tokens > shortest]
    for batch in exact:
        assert price(batch) == pytest.approx(model.step_us(batch), rel=WITHIN), batch.key
    assert {bool(batch.decodes) for batch in exact} == {True, False}
    sums = vidur_price(replace(model, stream_cost=()), layout)
    wrong, of_sums = (errors_of(each, model, batches) for each in (price, sums))
    assert statistics.fmean(wrong) < {"pypi": 0.9, "repo": 0.6}[layout] * statistics.fmean(of_sums)


def ranges_of(model: LatencyModel, layout: Layout) -> Ranges:
    return choose_ranges(StepCosts(model), VidurOptions(layout=layout, **LIMITS), layout)


def vidur_price(model: LatencyModel, layout: Layout) -> Price:
    costs, ranges = StepCosts(model), ranges_of(model, layout)
    dimensions = dimensions_of(model.configuration, model.occurrences)
    tables = build_vidur_tables([costs], dimensions, ranges, layout)
    rules = VidurRules(tables, layout, ranges.granularity, costs.layers)
    return lambda batch: 1e3 * rules.step_ms(batch)


def errors_of(price: Price, model: LatencyModel, batches: list[Batch]) -> list[float]:
    return [abs(price(batch) / model.step_us(batch) - 1) for batch in batches]


def test_measured_collectives_are_in_vidurs_all_reduce() -> None:
    model = measured.models(measured.LLAMA)[1]
    costs = StepCosts(model)
    dimensions = dimensions_of(model.configuration, model.occurrences)
    ranges = choose_ranges(costs, VidurOptions(max_length=256, max_chunk=128, max_batch=8), "pypi")
    tables = build_vidur_tables([costs], dimensions, ranges, "pypi")
    collectives = [o for o in model.occurrences if o.signature.name == "dooly::all_reduce"]
    assert collectives
    row = next(row for row in tables.all_reduce if row["size"] == 64 * 2 * dimensions.hidden)
    in_vidur = row["time_stats.all_reduce.median"] * 2 * dimensions.layers
    measured_us = sum(
        o.count * model.occurrence(o, Batch.prefill(64)).median_us for o in collectives
    )
    assert 1e3 * in_vidur == pytest.approx(measured_us)


def vidur_steps(ranges: Ranges, layout: Layout, seed: int) -> list[Batch]:
    """Prefills of whole steps of its grid, decodes of any length, both in eighths.

    Only the release prices several prefills of a step one by one.
    """
    draw = random.Random(seed)

    def prefills(room: int) -> Batch:
        count = draw.randint(1, 3) if layout == "pypi" else 1
        parts = []
        for _ in range(count):
            chunk = CHUNK_STEP * draw.randint(1, max(1, room // CHUNK_STEP // count))
            steps = (ranges.max_length - chunk) // ranges.granularity
            history = ranges.granularity * draw.choice((0, draw.randint(0, steps)))
            parts.append(Request(chunk, history))
        return Batch(tuple(parts))

    def decodes(count: int) -> Batch:
        contexts = [draw.randint(1, ranges.max_length - 2) for _ in range(count)]
        return Batch(tuple(Request(1, context) for context in contexts))

    found = []
    for index in range(POINTS):
        eighths = TOKEN_STEP * draw.randint(1, max(1, ranges.max_batch // TOKEN_STEP))
        kind = index % 3
        if kind == 0:
            found.append(decodes(draw.randint(1, ranges.max_batch)))
        elif kind == 1:
            found.append(prefills(ranges.max_chunk))
        else:
            found.append(prefills(ranges.max_chunk - eighths) + decodes(eighths))
    return found


# -- LLMServingSim ------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_llmservingsim(name: str) -> None:
    models = list(measured.models(name))
    architecture = architecture_of(models[0].configuration, models[0].occurrences)
    all_costs = [LayerCosts(model, architecture) for model in models]
    axes = axes_of(models)
    grids = choose_grids(axes, LLMServingSimOptions())
    tables = build_tables(all_costs, grids, axes)
    for costs in all_costs:
        rules = LLMServingSimRules(tables, architecture, costs.layers, costs.degree)
        batches = random_batches(
            4 * POINTS,
            max_tokens=min(grids.max_tokens, grids.attention.chunks[-1]),
            max_seqs=grids.max_seqs,
            max_length=grids.max_kv,
            seed=costs.degree,
        )
        # Beyond the longest history that was measured the simulator follows the last two rows
        # down as well as up; the latency model does not fall.
        longest = grids.attention.histories[-1]
        batches = [b for b in batches if all(p.context <= longest for p in b.prefills)]
        if architecture.experts and costs.degree > 1:
            # Several steps of few tokens have one place in moe.csv: the manifest says so.
            batches = [batch for batch in batches if batch.num_tokens > 8]
        if name not in measured.LARGE:
            # The simulator routes tokens evenly; elsewhere this is the database's own step.
            close(costs.model, rules.step_us, batches[:POINTS], us=costs.step_us)
            continue
        # Between two rows with different padding or modes the simulator draws a straight line.
        errors = [abs(rules.step_us(batch) / costs.step_us(batch) - 1) for batch in batches]
        assert statistics.median(errors) < 0.002
        assert statistics.fmean(errors) < WITHIN


# -- Revati -------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_revati(name: str, tmp_path: Path) -> None:
    models = measured.models(name)
    get_exporter("revati").export(models, tmp_path / "out", {})
    for model in models:
        predictor = Predictor(tmp_path / "out", model.configuration.tensor_parallel)

        def price(batch: Batch, predictor: Predictor = predictor) -> float:
            requests = [(request.query, request.context) for request in batch.requests]
            return 1e6 * predictor.predict_step(requests)

        close(model, price, steps_of(model, prefills=4))


def steps_of(model: LatencyModel, prefills: int) -> list[Batch]:
    axes = axes_of([model])
    return random_batches(
        POINTS,
        max_tokens=min(axes.tokens[-1], axes.chunks[-1]),
        max_seqs=min(axes.sizes[-1], axes.requests[-1]),
        max_length=axes.max_length,
        seed=model.configuration.tensor_parallel,
        prefills=prefills,
    )


# -- SGLang Simulator ---------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_sglang_simulator(name: str, tmp_path: Path) -> None:
    models = measured.models(name)
    manifest = get_exporter("sglang-simulator").export(models, tmp_path / "out", {})
    for model in models:
        predictors = manifest["predictors"][str(model.configuration.tensor_parallel)]
        table = json.loads((tmp_path / "out" / predictors["replay"]["file"]).read_text())
        known = {
            Batch(tuple(Request(*pair) for pair in json.loads(key))): seconds
            for key, seconds in random.Random(1).sample(sorted(table.items()), POINTS)
        }
        close(model, lambda batch, known=known: 1e6 * known[batch], list(known))
        # A model of sums and extremes is off between steps; the manifest says by how much.
        bundle = joblib.load(tmp_path / "out" / predictors["ml"]["file"])
        batches = steps_of(model, prefills=4)
        predicted = bundle["model"].predict([features_of(batch) for batch in batches])
        errors = [
            100 * abs(1e6 * float(seconds) / model.step_us(batch) - 1)
            for seconds, batch in zip(predicted, batches, strict=True)
        ]
        assert statistics.fmean(errors) < 2 * predictors["ml"]["held_out_mape_percent"]
