"""What the planners of the paper's Table 3 reuse."""

from __future__ import annotations

from typing import Any

import pytest

from dooly_backend.database.records import Signature
from dooly_backend.profiling.planners import (
    PLANNERS,
    Item,
    Workload,
    cost,
    dooly,
    group_of,
    hf_diff,
    hf_model_diff,
    naive,
)

ARCHITECTURE = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}


def item(signature: str, group: str = "linear") -> Item:
    return Item(signature, group, points=10, seconds=2.0)


def workload(model: str, signatures: str, backend: str = "A", **config: Any) -> Workload:
    return Workload(
        model, backend, ARCHITECTURE | config, tuple(item(s) for s in signatures.split())
    )


CORPUS = [
    workload("one", "a b b c", vocab_size=1),
    workload("copy of one", "a b c", vocab_size=1),
    workload("same widths, sliding window", "a b d", vocab_size=1, sliding_window=4096),
    workload("other widths", "a e", hidden_size=2048),
    workload("one, other backend", "a b f", backend="B", vocab_size=1),
]


def names(work: list[list[Item]]) -> list[str]:
    return [" ".join(i.signature for i in items) for items in work]


def test_naive_measures_every_configuration_once():
    assert names(naive(CORPUS)) == ["a b c", "a b c", "a b d", "a e", "a b f"]


def test_hf_diff_reuses_equal_configs_of_a_backend_only():
    assert names(hf_diff(CORPUS)) == ["a b c", "", "a b d", "a e", "a b f"]


def test_hf_model_diff_overlooks_what_is_no_architecture_parameter():
    assert names(hf_model_diff(CORPUS)) == ["a b c", "", "", "a e", "a b f"]


def test_a_head_size_that_follows_from_others_is_no_difference():
    explicit = workload("explicit", "a", num_key_value_heads=32, head_dim=128)
    assert names(hf_model_diff([workload("implicit", "a b"), explicit])) == ["a b", ""]
    wider = workload("wider", "a", head_dim=256)
    assert names(hf_model_diff([workload("implicit", "a b"), wider])) == ["a b", "a"]


def test_dooly_measures_every_signature_once():
    assert names(dooly(CORPUS)) == ["a b c", "", "d", "e", "f"]


def test_nobody_measures_more_than_naive_and_dooly_covers_everything():
    everything = {i.signature for w in CORPUS for i in w.items}
    for plan in PLANNERS.values():
        assert cost(plan(CORPUS)).seconds <= cost(naive(CORPUS)).seconds
    assert {i.signature for items in dooly(CORPUS) for i in items} == everything


def test_cost_adds_up_by_group():
    work = [[item("a", "attention"), item("b", "linear")], [item("c", "linear")]]
    assert (cost(work).signatures, cost(work).points, cost(work).seconds) == (3, 30, 6.0)
    assert cost(work, "linear").signatures == 2
    assert cost(work, "moe").seconds == 0


@pytest.mark.parametrize(
    ("name", "kind", "group"),
    [
        ("Attention", "batch", "attention"),
        ("aten::index.Tensor", "batch", "other"),
        ("Sampler", "batch", "other"),
        ("MoERunner", "routing", "moe"),
        ("QKVParallelLinear", "tokens", "linear"),
        ("_C::onednn_mm.default", "tokens", "linear"),
        ("RMSNorm", "tokens", "other"),
    ],
)
def test_groups(name: str, kind: Any, group: str):
    state = '{"stateful":{"backend":"A"}}' if group == "attention" else '{"stateful":{}}'
    assert group_of(Signature(name, "module", kind, state)) == group
