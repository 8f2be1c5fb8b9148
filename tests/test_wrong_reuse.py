"""Another model's attention in the place of one's own: integration/wrong_reuse."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from measured import CPU

from dooly_backend.errors import InputError
from dooly_backend.simulation.source import Source, from_database
from dooly_backend.workload import Batch
from integration.wrong_reuse.run import (
    calls,
    compared,
    forward_us,
    forwards,
    is_attention,
    percent,
    with_attention,
)

DATABASE = str(CPU)


@pytest.fixture(scope="module")
def own() -> Source:
    return from_database(DATABASE, "small-gemma2", None, {"tensor_parallel": 1})


@pytest.fixture(scope="module")
def donor() -> Source:
    return from_database(DATABASE, "small-llama", None, {"tensor_parallel": 1})


def test_only_attention_is_the_donors(own: Source, donor: Source) -> None:
    """Gemma's window and its full attention become one kind; all else stays."""
    wrong = with_attention(own.fitted, donor.fitted)
    before, after = own.fitted.occurrences, wrong.occurrences
    assert len({o.signature.hash for o in before if is_attention(o)}) == 2
    (given,) = {o.signature.hash for o in after if is_attention(o)}
    assert given in donor.fitted.counts
    assert [o for o in before if not is_attention(o)] == [o for o in after if not is_attention(o)]
    assert sum(wrong.counts.values()) == sum(own.fitted.counts.values())
    batch = Batch.prefill(100)
    own_attention = sum(
        o.count * float(own.fitted.predict(o.signature.hash, [batch]).us[0])
        for o in before
        if is_attention(o)
    )
    layers = sum(o.count for o in after if is_attention(o))
    wrong_attention = layers * float(donor.fitted.predict(given, [batch]).us[0])
    whole = {name: float(f.operations_us([batch])[0]) for name, f in
             {"own": own.fitted, "wrong": wrong}.items()}  # fmt: skip
    assert whole["wrong"] - whole["own"] == pytest.approx(wrong_attention - own_attention)


def test_a_donor_has_one_kind_of_attention(own: Source, donor: Source) -> None:
    with pytest.raises(InputError, match="2 kinds of attention: the donor needs one"):
        with_attention(donor.fitted, own.fitted)


def test_a_workload_tells_what_the_other_attention_costs(own: Source, donor: Source) -> None:
    wrong = replace(own, fitted=with_attention(own.fitted, donor.fitted))
    workload = "fixed:requests=6,prompt=200,output=6,rate=5"
    same = compared(own, own, workload, None)
    assert same["error"] == {"ttft": 0.0, "tpot": 0.0}
    row = compared(own, wrong, workload, None)
    assert row["error"]["ttft"] == pytest.approx(
        percent(row["wrong_ttft_s"], row["own_ttft_s"]), abs=0.01
    )
    assert row["error"]["ttft"] != 0
    assert same["extrapolated"] == 0
    long = compared(own, wrong, "fixed:requests=2,prompt=900,output=4,rate=5", None)
    assert 0 < long["extrapolated"] <= 100


def test_forward_passes_of_few_layers(own: Source, donor: Source) -> None:
    """All layers of the model are the model; fewer of them are the first ones."""
    batch = Batch.decode(4, 100)
    layers = 1 + max(layer for o in own.fitted.occurrences for layer in o.layers)
    outside = {"", "logits_processor", "sampler"}  # "": what the model itself runs
    whole = float(own.fitted.operations_us([batch])[0])
    rest = sum(
        o.count * float(own.fitted.predict(o.signature.hash, [batch]).us[0])
        for o in own.fitted.occurrences
        if o.path.split(".")[0] in outside
    )
    assert forward_us(own.fitted, batch, layers) == pytest.approx(whole - rest)
    half = forward_us(own.fitted, batch, layers // 2)
    none = forward_us(own.fitted, batch, 0)
    assert none < half < whole
    attention = [o for o in own.fitted.occurrences if is_attention(o)]
    assert sum(calls(o, 3) for o in attention) == 3
    rows = pd.DataFrame({"batch": [batch.key], "forward_live_us": [half]})
    (row,) = forwards(own.fitted, with_attention(own.fitted, donor.fitted), rows, layers // 2)
    assert row["own_error"] == 0
    assert row["wrong_error"] == pytest.approx(percent(row["wrong_us"], row["live_us"]), abs=0.02)
