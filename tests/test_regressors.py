"""The regressors: each on its own, and which one a signature gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import ATTENTION, LINEAR, ROPE, SAMPLER, at

from dooly_backend.config import load_grid
from dooly_backend.database.records import Measurement, Signature
from dooly_backend.errors import InputError
from dooly_backend.regression import fitting, models
from dooly_backend.regression.baseline import signature_latency
from dooly_backend.regression.fitting import (
    choose,
    fit_signature,
    fit_signatures,
    training_of,
)
from dooly_backend.regression.models import (
    Parameters,
    Predictor,
    Regressor,
    Training,
    get_model,
    model,
    models_of,
)
from dooly_backend.workload import Batch, Request, WorkloadPoint

MOE = Signature("FusedMoE", "module", "routing", '{"routing": {"experts": 64, "top_k": 4}}')
WINDOWED = Signature("Attention", "module", "batch", '{"attributes": {"sliding_window": 1000}}')
CHUNKS, HISTORIES = (16, 64, 256, 1024, 4096), (0, 512, 2048, 8192)
SIZES, CONTEXTS = (1, 4, 16, 64, 256), (64, 512, 2048, 8192)


def attention_us(batch: Batch, window: float = 1e9) -> float:
    """A device with a launch, a bandwidth, and a rate that it reaches only with enough work."""
    work = sum(min(r.context + i, window) for r in batch.prefills for i in range(1, r.query + 1, 1))
    read = sum(min(r.context + 1, window) for r in batch.decodes)
    rate = 2000 * (1 - np.exp(-(sum(r.query for r in batch.prefills) or 1) / 400))
    return 10 + work / rate + read / 3000 + len(batch.decodes) / 50


def measured(us: Callable[[Batch], float], batches: list[Batch]) -> list[Measurement]:
    return [at(f"batch={batch.key}", us(batch)) for batch in batches]


def grid() -> list[Batch]:
    prefills = [Batch.prefill(chunk, history) for chunk in CHUNKS for history in HISTORIES]
    return prefills + [Batch.decode(size, context) for size in SIZES for context in CONTEXTS]


def curve(us: Callable[[int], float], kind: str = "tokens") -> list[Measurement]:
    places = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    return [at(f"{kind}={place}", us(place)) for place in places]


def moe() -> list[Measurement]:
    points = [(t, e) for t in (1, 4, 16, 64, 256) for e in (4, 8, 16, 32, 64) if e <= 4 * t]
    return [at(f"routing={t}x{e}", 20 + 3.0 * e + 0.02 * t * 4) for t, e in points]


OF_KIND: dict[Signature, list[Measurement]] = {
    ROPE: [at("constant", 2.0)],
    LINEAR: curve(lambda n: 20 + 0.1 * n),
    SAMPLER: curve(lambda n: 5 + 0.5 * n, "requests"),
    MOE: moe(),
    ATTENTION: measured(attention_us, grid()),
}
EVERY = [(s, m.name) for s in OF_KIND for m in models_of(s.kind)]


def learned(signature: Signature, name: str) -> tuple[Training, Predictor]:
    data = training_of(signature, OF_KIND[signature])
    parameters = json.loads(json.dumps(get_model(name).fit(data)))  # as a bundle keeps them
    return data, models.load(name, parameters, data.features)


# -- all of them -----------------------------------------------------------------


@pytest.mark.parametrize(("signature", "name"), EVERY, ids=lambda v: getattr(v, "kind", v))
def test_one_row_and_many_rows_agree(signature: Signature, name: str) -> None:
    data, predictor = learned(signature, name)
    rows = np.vstack([data.rows, data.rows * 0.7, data.rows * 3])
    many = predictor.many(rows)
    assert (many > 0).all()
    np.testing.assert_allclose([predictor.one(row) for row in rows.tolist()], many, rtol=1e-9)


@pytest.mark.parametrize(("signature", "name"), EVERY, ids=lambda v: getattr(v, "kind", v))
def test_damaged_parameters_are_an_error(signature: Signature, name: str) -> None:
    data, _ = learned(signature, name)
    for parameters in ({}, {"kind": "moon"}, {"places": "x", "values": [], "slope": None}, []):
        with pytest.raises(InputError, match=name):
            models.load(name, parameters, data.features)  # type: ignore[arg-type]


def test_an_unknown_regressor_is_named() -> None:
    with pytest.raises(InputError, match=r"'oracle'.*interpolation"):
        get_model("oracle")


# -- the baseline ----------------------------------------------------------------

prefills = st.builds(Batch.prefill, st.integers(2, 6000), st.integers(0, 9000), st.integers(1, 5))
decodes = st.builds(Batch.decode, st.integers(1, 300), st.integers(1, 9000))
either = prefills | decodes | st.builds(Batch.__add__, prefills, decodes)


@settings(deadline=None)
@given(st.lists(either, min_size=1, max_size=4), st.integers(0, 5))
def test_the_fast_baseline_is_the_baseline(batches: list[Batch], left_out: int) -> None:
    kept = OF_KIND[ATTENTION][left_out:]  # a grid with holes
    baseline = signature_latency(ATTENTION, kept)
    fitted = fit_signature(ATTENTION, kept, only=["interpolation-batch"]).predictor
    new = [batch for batch in batches if batch.key not in {m.point.batch.key for m in kept}]
    if new:
        expected = [baseline.at(batch)[0].statistics.median_us for batch in new]
        np.testing.assert_allclose(fitted.predict_batches(new).us, expected, rtol=1e-9)


@settings(deadline=None)
@given(st.integers(1, 4000), st.floats(4, 64))
def test_so_it_is_for_tokens_requests_and_routing(number: int, experts: float) -> None:
    for signature, point in ((LINEAR, "tokens"), (SAMPLER, "requests")):
        baseline = signature_latency(signature, OF_KIND[signature])
        batch = Batch.prefill(number) if point == "tokens" else Batch.decode(number, 1)
        fitted = fit_signature(signature, OF_KIND[signature], only=["interpolation"]).predictor
        expected = baseline.at(batch)[0].statistics.median_us
        assert fitted.predict_batches([batch]).us[0] == pytest.approx(expected)
    mixture = signature_latency(MOE, OF_KIND[MOE])
    fitted = fit_signature(MOE, OF_KIND[MOE], only=["interpolation-routing"]).predictor
    expected = mixture.at_routing(number, experts)[0].statistics.median_us  # type: ignore[attr-defined]
    predicted = fitted.predict({"num_tokens": number, "experts": experts})
    assert predicted.us == pytest.approx(expected)


# -- the physical one -------------------------------------------------------------


def test_the_roofline_goes_on_beyond_what_was_measured() -> None:
    knee = curve(lambda n: 10 + max(0.02 * n, 0.1 * n - 20))
    fitted = fit_signature(LINEAR, knee, only=["roofline"]).predictor
    predicted = fitted.predict({"num_tokens": np.array([100, 1500, 20_000])})
    np.testing.assert_allclose(predicted.us, [12, 140, 1990], rtol=0.15)
    assert predicted.extrapolated.tolist() == [False, False, True]


@settings(deadline=None, max_examples=30)
@given(either, st.integers(1, 500), st.integers(1, 500), st.integers(0, 2**32 - 1))
def test_the_roofline_never_falls(batch: Batch, query: int, context: int, seed: int) -> None:
    """More new tokens, more cached ones, more decodes: never quicker, whatever the noise."""
    noise = np.random.default_rng(seed)
    noisy = measured(lambda b: attention_us(b) * noise.lognormal(0, 0.3), grid())
    predictor = fit_signature(ATTENTION, noisy, only=["roofline"]).predictor
    longer = Batch.parse(
        ",".join(
            f"{r.query if r.is_decode else r.query + query}+{r.context + context}"
            for r in batch.requests
        )
    )
    us = predictor.predict_batches([batch, longer, batch + Batch.decode(1, 64)]).us
    assert us[0] <= us[1] * (1 + 1e-9)
    if batch.decodes:
        assert us[0] <= us[2] * (1 + 1e-9)


def test_isotonic_never_falls() -> None:
    noise = np.random.default_rng(1)
    noisy = curve(lambda n: (10 + 0.1 * n) * noise.lognormal(0, 0.3))
    fitted = fit_signature(LINEAR, noisy, only=["isotonic"]).predictor
    us = fitted.predict({"num_tokens": np.arange(1, 4000)}).us
    assert (np.diff(us) >= 0).all()


# -- which one a signature gets ---------------------------------------------------


def errors(signature: Signature, kept: list[Measurement], held: list[Batch]) -> dict[str, float]:
    """Mean relative errors at batches that were not measured."""
    facts = json.loads(signature.canonical).get("attributes", {})
    truth = np.array([attention_us(batch, facts.get("sliding_window", 1e9)) for batch in held])
    found = {}
    for name, only in (("chosen", []), ("baseline", ["interpolation-batch"])):
        us = fit_signature(signature, kept, only).predictor.predict_batches(held).us
        found[name] = float(np.abs(np.log(us / truth)).mean())
    return found


HELD = [Batch.parse(t) for t in ("1x128+1024", "1x700+300", "8x1+1000", "100x1+3000", "1x2000+50")]
MIXED = [Batch.parse(t) for t in ("1x512+0,32x1+2000", "1x100+4000,100x1+1000", "1x64+64,4x1+64")]
SEVERAL = [Batch.parse(t) for t in ("4x256+0", "1x500+0,1x90+700", "3x200+0", "2x1024+512")]


@pytest.mark.parametrize(("held", "share"), [(HELD, 0.3), (MIXED, 0.5)], ids=["held", "mixed"])
@pytest.mark.parametrize("signature", [ATTENTION, WINDOWED], ids=["full", "window"])
def test_attention_is_predicted_better_than_by_the_baseline(
    signature: Signature, held: list[Batch], share: float
) -> None:
    window = 1000 if signature is WINDOWED else 1e9
    found = errors(signature, measured(lambda batch: attention_us(batch, window), grid()), held)
    assert found["chosen"] < share * found["baseline"]
    assert found["chosen"] < 0.1


def test_measured_steps_of_several_prefills_teach_how_they_go_together() -> None:
    """Together they fill a device that each alone does not: only such steps can tell."""
    several = [Batch.prefill(c, h, n) for c in (64, 256, 1024) for h in (0, 512) for n in (2, 4)]
    several = [batch for batch in several if batch not in SEVERAL]
    alone = errors(ATTENTION, measured(attention_us, grid()), SEVERAL)
    taught = errors(ATTENTION, measured(attention_us, grid() + several), SEVERAL)
    assert taught["chosen"] < 0.1
    assert taught["chosen"] < alone["chosen"] / 3


def test_measured_mixed_batches_tell_how_phases_overlap() -> None:
    """A device that runs the shorter phase behind the longer one."""

    def us(batch: Batch) -> float:
        parts = [Batch(part) for part in (batch.prefills, batch.decodes) if part]
        return max(attention_us(part) for part in parts)

    some = [Batch.prefill(c, h) + Batch.decode(n, 1024) for c in (64, 1024) for h in (0, 2048)
            for n in (4, 16, 64)]  # fmt: skip
    held = [Batch.prefill(c, 300) + Batch.decode(n, 700) for c in (200, 2000) for n in (8, 200)]
    truth = np.array([us(batch) for batch in held])
    blind = fit_signature(ATTENTION, measured(us, grid())).predictor
    seeing = fit_signature(ATTENTION, measured(us, grid() + some)).predictor
    wrong = np.abs(np.log(blind.predict_batches(held).us / truth)).mean()
    right = np.abs(np.log(seeing.predict_batches(held).us / truth)).mean()
    assert right < 0.05
    assert right < wrong / 2


def test_measured_mixed_batches_tell_that_a_long_decode_is_not_split_beside_a_prefill() -> None:
    """What vLLM's Triton kernel does: together they take longer than one after the other."""

    def us(batch: Batch) -> float:
        together = sum(attention_us(Batch(p)) for p in (batch.prefills, batch.decodes) if p)
        longest = max(request.context for request in batch.decodes) if batch.decodes else 0
        return max(together, 0.05 * longest) if batch.prefills else together

    some = [
        Batch.prefill(chunk, history) + Batch.decode(count, length)
        for chunk in (64, 256, 1024)
        for history in (0, 2048)
        for count in (4, 16, 64)
        for length in (1000, 6000)
    ]
    held = [
        Batch.prefill(c, 300) + Batch.decode(n, 900) + Batch.decode(1, 4000)
        for c in (100, 500)
        for n in (3, 40)
    ]
    truth = np.array([us(batch) for batch in held])
    found = [
        np.abs(
            np.log(
                fit_signature(ATTENTION, known, [name]).predictor.predict_batches(held).us / truth
            )
        )
        for known in (measured(us, grid()), measured(us, grid() + some))
        for name in ("roofline", "corrected")
    ]
    blind, seeing = found[:2], found[2:]
    for name in (0, 1):
        assert seeing[name].mean() < 0.15
        assert seeing[name].mean() < blind[name].mean() / 3


def test_measured_uneven_decodes_tell_that_the_longest_is_waited_for() -> None:
    """The batches of the sweep `gpu`, and its even ones alone: few of them wait for the longest."""

    def us(batch: Batch) -> float:
        if batch.prefills:
            return attention_us(batch)
        lengths = [request.context for request in batch.decodes]
        return 10 + max(sum(lengths) / 800, max(lengths) / 50)

    batches = [point.batch for point in load_grid("gpu").batch_points(131072) if point.batch]
    batches = [batch for batch in batches if not (batch.prefills and batch.decodes)]
    even = [batch for batch in batches if len(set(batch.requests)) == 1]
    lengths = [
        (5000, 900, 300),
        (9000, *[700] * 5),
        (2500, 2000, 1500, 400, 200, 90),
        (6000, 6000, 50),
    ]
    held = [Batch(tuple(Request(1, length) for length in each)) for each in lengths]
    truth = np.array([us(batch) for batch in held])
    for known in (measured(us, even), measured(us, batches)):
        predicted = fit_signature(ATTENTION, known).predictor.predict_batches(held).us
        assert np.abs(np.log(predicted / truth)).mean() < 0.02


def test_what_the_baseline_does_as_well_is_left_to_it() -> None:
    data = training_of(LINEAR, curve(lambda n: 20 + 0.1 * n))  # a line: many can draw it
    chosen = choose(data)
    assert chosen.model == "interpolation"
    assert chosen.errors["roofline"] < 1e-6


def test_a_signature_with_one_point_is_constant_there() -> None:
    fitted = fit_signature(LINEAR, [at("tokens=16", 10.0, 11.0, 12.0)])
    prediction = fitted.predictor.predict({"num_tokens": 16})
    assert prediction.us == 11
    assert prediction.low_us < 11 < prediction.high_us
    assert fitted.predictor.predict({"num_tokens": 17}).extrapolated


def test_times_of_nothing_are_learned_from() -> None:
    """An event's own cost is taken off, and an imported table may hold zeros."""
    points = [at(f"tokens={n}", max(0.0, 0.1 * n - 5)) for n in (1, 2, 4, 8, 64, 128, 256, 512)]
    us = fit_signature(LINEAR, points).predictor.predict({"num_tokens": np.array([3, 100])}).us
    assert us[0] < 0.05
    assert us[1] == pytest.approx(5, rel=0.3)


def test_what_was_never_measured_is_no_guess() -> None:
    only_prefills = [m for m in OF_KIND[ATTENTION] if m.point.batch.prefills]
    predictor = fit_signature(ATTENTION, only_prefills).predictor
    with pytest.raises(InputError, match="no measured decodes"):
        predictor.predict_batches([Batch.decode(1, 64)])


def test_features_that_do_not_fit_are_named() -> None:
    predictor = fit_signature(LINEAR, OF_KIND[LINEAR]).predictor
    with pytest.raises(InputError, match="'num_tokens' is missing"):
        predictor.predict({"num_reqs": 3})
    with pytest.raises(InputError, match="no feature 'num_reqs'"):
        predictor.predict({"num_tokens": 3, "num_reqs": 3})


def test_points_of_routing_are_predicted_by_their_experts() -> None:
    predictor = fit_signature(MOE, OF_KIND[MOE]).predictor
    points = [WorkloadPoint("routing", num_tokens=100, num_experts=n) for n in (10, 50)]
    np.testing.assert_allclose(predictor.predict_points(points).us, [58, 178], rtol=0.03)


# -- registering --------------------------------------------------------------------


class Always(Regressor):
    """Knows the answer."""

    name = "always"
    kinds = ("requests",)

    def fit(self, data: Training, earlier: Parameters | None = None) -> Parameters:
        return {"factor": 3.0}

    def load(self, parameters: Parameters, features: tuple[str, ...]) -> Predictor:
        factor = float(parameters["factor"])

        class Known(Predictor):
            def many(self, rows: np.ndarray) -> np.ndarray:
                return factor * np.sqrt(rows[:, 0])

        return Known()


@pytest.fixture
def registered() -> Iterator[None]:
    model(Always)
    yield
    del models._MODELS["always"]


def test_a_regressor_can_be_added(registered: None) -> None:
    roots = curve(lambda n: 3 * n**0.5, "requests")
    fitted = fit_signature(SAMPLER, roots)
    assert fitted.model == "always"
    assert fitted.predictor.predict({"num_reqs": 100}).us == pytest.approx(30)
    with pytest.raises(ValueError, match="always"):
        model(Always)


def test_several_processes_choose_what_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        ATTENTION: measured(attention_us, grid()),
        LINEAR: curve(lambda n: 20 + 0.1 * n + (n > 100) * 5),
        MOE: moe(),
    }
    alone = fit_signatures(known)
    monkeypatch.setattr(fitting, "_WORTH_PROCESSES", 0)
    monkeypatch.setattr(fitting.os, "cpu_count", lambda: 2)
    assert fit_signatures(known) == alone


def test_a_regressor_of_this_process_alone_is_tried_here(
    registered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_WORTH_PROCESSES", 0)
    monkeypatch.setattr(fitting.os, "cpu_count", lambda: 2)
    (fitted,) = fit_signatures({SAMPLER: curve(lambda n: 3 * n**0.5, "requests")}).values()
    assert fitted.model == "always"
