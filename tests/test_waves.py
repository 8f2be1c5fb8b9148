"""Waves of thread blocks, and kernels that change from a size on: found by what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from sample_records import at

from dooly_backend.database.records import Signature
from dooly_backend.regression.features import facts_of
from dooly_backend.regression.fitting import fit_signature
from dooly_backend.regression.scalar import compiled
from dooly_backend.regression.switch import Switched
from dooly_backend.regression.tables import Constant
from dooly_backend.regression.waves import Waves, best_width, pieces
from dooly_backend.workload import Batch

#: 32 heads that share 8 key-value heads, as in Llama-3.1-8B.
ATTENTION = Signature(
    "Attention", "module", "batch", '{"attributes": {"num_heads": 32, "num_kv_heads": 8}}'
)
PROCESSORS = 132
SIZES = (1, 2, 4, 6, 8, 12, 16, 17, 20, 24, 28, 32, 33, 36, 40, 48, 49, 56, 64, 80, 96, 128)
CONTEXTS = (64, 256, 1024, 2048, 4096, 8192)
CHUNKS = (16, 64, 128, 176, 256, 304, 384, 512, 560, 720, 896, 1024, 1100, 1280, 1536, 1700, 2048)
HISTORIES = (0, 512, 2048, 8192)
DECODES = [Batch.decode(n, c) for n in SIZES for c in CONTEXTS]
PREFILLS = [Batch.prefill(n, c) for n in CHUNKS for c in HISTORIES]


def waves_us(batch: Batch) -> float:
    """A launch, and so many waves, each as long as its blocks read or compute."""
    if batch.prefills:
        (request,) = batch.requests
        number = math.ceil(math.ceil(request.query * 4 / 128) * 8 / PROCESSORS)
        return 9 + number * (request.context + request.query / 2) / 60
    number = math.ceil(len(batch.decodes) * 8 / PROCESSORS)
    return 9 + number * batch.decodes[0].context / 90


def errors(
    law: Callable[[Batch], float], known: list[Batch], held_out: list[Batch]
) -> tuple[float, float]:
    """Mean and worst, shares."""
    points = [at(f"batch={batch.key}", law(batch)) for batch in known]
    predictor = fit_signature(ATTENTION, points).predictor
    truth = np.array([law(batch) for batch in held_out])
    found = np.abs(predictor.predict_batches(held_out).us / truth - 1)
    one = [predictor.predict(dict(zip(predictor.feature_names, row, strict=True))).us
           for row in predictor.rows(held_out).tolist()]  # fmt: skip
    assert one == pytest.approx(predictor.predict_batches(held_out).us)
    return float(found.mean()), float(found.max())


def test_what_lies_beside_a_waves_edge_is_predicted() -> None:
    held_out = [
        *(Batch.decode(n, c) for n in (14, 18, 31, 34, 44, 52, 100) for c in (700, 3000)),
        *(Batch.prefill(n, c) for n in (90, 480, 540, 700, 1050, 1400) for c in (0, 1000, 5000)),
    ]
    mean, worst = errors(waves_us, DECODES + PREFILLS, held_out)
    assert mean < 0.03
    assert worst < 0.12  # a wave more or less is 33 to 100 %


def test_the_width_is_that_of_the_device() -> None:
    points = [at(f"batch={batch.key}", waves_us(batch)) for batch in DECODES + PREFILLS]
    fitted = fit_signature(ATTENTION, points, only=["roofline"])
    for phase in fitted.parameters["phases"].values():
        # 8 heads a request: 132 processors take as many requests as 128 or 135.
        assert 128 <= phase["waves"]["width"] < 136


def test_smooth_times_have_no_waves() -> None:
    def smooth(batch: Batch) -> float:
        return 9 + len(batch.decodes) * batch.decodes[0].context / 1500

    points = [at(f"batch={batch.key}", smooth(batch)) for batch in DECODES]
    (phase,) = fit_signature(ATTENTION, points, only=["roofline"]).parameters["phases"].values()
    assert "waves" not in phase
    assert "switch" not in phase


def switched_us(batch: Batch) -> float:
    """Up to 16 requests the keys are divided, from 17 on they are not."""
    number, context = len(batch.decodes), batch.decodes[0].context
    return 8 + (number * context / 1600 if number <= 16 else context / 20 + number * context / 900)


def test_another_kernel_from_a_size_on_is_predicted_on_both_sides() -> None:
    held_out = [Batch.decode(n, c) for n in (10, 15, 16, 17, 18, 22, 44) for c in (700, 3000)]
    mean, worst = errors(switched_us, DECODES, held_out)
    assert mean < 0.02
    assert worst < 0.08
    points = [at(f"batch={batch.key}", switched_us(batch)) for batch in DECODES]
    (phase,) = fit_signature(ATTENTION, points, only=["corrected"]).parameters["phases"].values()
    assert phase["switch"]["at"] == 16


def test_heads_are_read_off_the_signature() -> None:
    assert facts_of(ATTENTION) == {"kv_heads": 8.0, "queries_per_kv": 4.0}
    told = '{"attributes": {"sliding_window": 1000, "num_heads": 0, "num_kv_heads": 0}}'
    assert facts_of(Signature("Attention", "module", "batch", told)) == {"window": 1000.0}


def test_parameters_that_no_fit_has_made() -> None:
    good = {"blocks": "b", "work": "w", "per": "p", "width": 132.0, "each": 1.0, "of_work": 0.5}
    good |= {"divided": False}
    assert compiled(Waves(good, ("b", "w", "p")).write)([133.0, 6.0, 3.0]) == 2 * (1.0 + 0.5 * 2.0)
    for wrong in ({"width": 0.0}, {"each": -1.0}, {"of_work": float("-inf")}):
        with pytest.raises(ValueError, match="waves need"):
            Waves(good | wrong, ("b", "w", "p"))
    with pytest.raises(ValueError, match="not in tuple"):
        Waves(good, ("b", "w"))


def divided_us(batch: Batch) -> float:
    """Waves of pieces of requests' keys, by the rule of FlashAttention 3, written down apart."""
    context = batch.decodes[0].context
    blocks, most = len(batch.decodes) * 8, min(math.ceil((context + 1) / 128), 32)
    parts = 1
    if blocks < 0.8 * PROCESSORS and most > 4:
        waves = [blocks * n / PROCESSORS for n in range(1, most + 1)]
        fullness = [w / math.ceil(w) for w in waves]
        parts = next(n for n, f in enumerate(fullness, 1) if f >= 0.85 * max(fullness))
    return 9 + math.ceil(blocks * parts / PROCESSORS) * (2 + context / parts / 90)


def test_work_that_is_divided_to_fill_waves_is_predicted() -> None:
    held_out = [Batch.decode(n, c) for n in (3, 5, 7, 10, 14, 15, 18, 34, 60) for c in (700, 3000)]
    mean, worst = errors(divided_us, DECODES, held_out)
    assert mean < 0.01  # 0.028 in waves of whole requests
    assert worst < 0.03
    points = [at(f"batch={batch.key}", divided_us(batch)) for batch in DECODES]
    (phase,) = fit_signature(ATTENTION, points, only=["roofline"]).parameters["phases"].values()
    assert phase["waves"]["divided"]


def test_pieces_fill_a_wave() -> None:
    table = pieces(132.0)
    assert table.shape == (106, 33)
    # 64 blocks are one wave in two pieces; 48 and 104 nearly fill two and four in five.
    assert (table[64, 32], table[48, 32], table[104, 32]) == (2, 5, 5)
    assert (table[:, :5] == 1).all()  # few keys are not divided
    assert (table[8, 10], table[8, 32]) == (9, 14)


def test_few_points_have_no_width() -> None:
    blocks = np.array([8.0, 64.0, 256.0])
    assert best_width(blocks, lambda width, chosen: 0.0) is None


def test_a_side_is_chosen_row_by_row() -> None:
    switched = Switched(0, 16.0, Constant(1.0), Constant(2.0))
    assert switched.many(np.array([[16.0], [17.0], [3.0]])).tolist() == [1.0, 2.0, 1.0]
    assert [switched.one([n]) for n in (16.0, 16.5)] == [1.0, 2.0]
