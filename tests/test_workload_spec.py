"""Workloads: what a line or file means, the same for a seed, with the statistics it names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dooly_backend.engines.prompts import prompt
from dooly_backend.errors import InputError
from dooly_backend.simulation.records import ServingRequest
from dooly_backend.simulation.traces import read_trace
from dooly_backend.simulation.workload import known_workloads, load_workload


def gaps(spec: str) -> np.ndarray:
    return np.diff([r.arrival_s for r in load_workload(spec).build()])


def test_every_shipped_workload_builds() -> None:
    assert {"fixed", "paper-small", "paper-large", "prefill-heavy", "decode-heavy"} <= set(
        known_workloads()
    )
    for name in known_workloads():
        workload = load_workload(name)
        assert len(workload.build()) == workload.requests


@pytest.mark.parametrize(
    ("name", "prompt_tokens", "output_tokens"),
    [("paper-small", (1717, 1911), (385, 410)), ("paper-large", (950, 1232), (388, 397))],
)
def test_lengths_have_the_papers_median_and_mean(
    name: str, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int]
) -> None:
    requests = load_workload(f"{name}:requests=40000").build()
    for lengths, (median, mean) in (
        ([r.prompt_tokens for r in requests], prompt_tokens),
        ([r.output_tokens for r in requests], output_tokens),
    ):
        assert np.median(lengths) == pytest.approx(median, rel=0.02)
        assert np.mean(lengths) == pytest.approx(mean, rel=0.02)


def test_a_seed_decides_everything_and_the_rate_only_arrivals() -> None:
    spec = "paper-small:requests=50"
    assert load_workload(spec).build() == load_workload(spec).build()
    assert load_workload(f"{spec},seed=1").build() != load_workload(spec).build()
    slow, fast = (load_workload(f"{spec},rate={rate}").build() for rate in (1, 4))
    assert [r.prompt_tokens for r in slow] == [r.prompt_tokens for r in fast]
    assert [r.arrival_s for r in slow] == pytest.approx([4 * r.arrival_s for r in fast])


def test_arrivals() -> None:
    poisson = gaps("fixed:requests=20000,rate=5")
    assert poisson.mean() == pytest.approx(0.2, rel=0.03)
    assert poisson.std() == pytest.approx(0.2, rel=0.03)
    assert gaps("fixed:requests=10,rate=4,arrivals=uniform") == pytest.approx([0.25] * 9)
    assert not gaps("fixed:requests=10,arrivals=burst").any()
    bursty = gaps("fixed:requests=16000,rate=5,arrivals=bursty,burst=4")
    assert (bursty == 0).mean() == pytest.approx(0.75, abs=0.001)
    assert bursty.mean() == pytest.approx(0.2, rel=0.05)
    closed = load_workload("fixed:concurrency=7")
    assert (closed.arrivals, closed.concurrency) == ("closed", 7)


def test_prefix_groups() -> None:
    requests = load_workload("fixed:prompt=100,prefixes=3,prefix_tokens=64").build()
    assert {r.prefix for r in requests} == {0, 1, 2}
    a, b, c = (
        ServingRequest(1, 0, 100, 1, prefix=0, prefix_tokens=64),
        ServingRequest(2, 0, 90, 1, prefix=0, prefix_tokens=64),
        ServingRequest(3, 0, 100, 1),
    )
    tokens = [prompt(r, 1000) for r in (a, b, c)]
    assert [len(t) for t in tokens] == [100, 90, 100]
    assert tokens[0][:64] == tokens[1][:64] != tokens[2][:64]
    assert tokens[0][64:90] != tokens[1][64:90]
    assert prompt(a, 1000) == tokens[0]
    assert {0 <= t < 1000 for t in tokens[0]} == {True}


def test_longest_cuts_requests() -> None:
    requests = load_workload("paper-small:longest=512").build()
    assert max(r.prompt_tokens + r.output_tokens for r in requests) == 512


def test_a_yaml_file_is_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("requests: 5\nprompt: 10\noutput: 3\narrivals: burst\n")
    workload = load_workload(f"{path}:output=4")
    assert workload.name == "mine"
    assert [(r.prompt_tokens, r.output_tokens) for r in workload.build()] == [(10, 4)] * 5


VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.5,100,10\n0.25,30,4\n"
LLMSERVINGSIM = '{"input_toks": 30, "output_toks": 4, "arrival_time_ns": 250000000}\n'
LLMSERVINGSIM += '{"input_toks": 100, "output_toks": 10, "arrival_time_ns": 500000000}\n'


@pytest.mark.parametrize(("name", "text"), [("a.csv", VIDUR), ("a.jsonl", LLMSERVINGSIM)])
def test_traces_of_other_simulators(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    requests = load_workload(str(path)).build()
    assert [(r.prompt_tokens, r.output_tokens, r.arrival_s) for r in requests] == [
        (30, 4, 0.0),
        (100, 10, 0.25),
    ]
    assert len(load_workload(f"{path}:requests=1").build()) == 1
    assert gaps(f"{path}:rate=2,arrivals=uniform") == pytest.approx([0.5])


def test_sharegpt_conversations(tmp_path: Path) -> None:
    turns = [("human", "x" * 40), ("gpt", "y" * 20), ("human", "z" * 4), ("gpt", "w" * 8)]
    path = tmp_path / "share.json"
    path.write_text(json.dumps([{"conversations": [{"from": f, "value": v} for f, v in turns]}]))
    assert [(r.prompt_tokens, r.output_tokens) for r in read_trace(path)] == [(10, 5), (16, 2)]
    with pytest.raises(InputError, match="need a rate"):
        load_workload(str(path))
    assert len(load_workload(f"{path}:rate=1").build()) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "num_prefill_tokens,other\n1,2\n", "none of output_tokens"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\nten,2\n", "'ten', no number"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n0,2\n", "at least one token"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n", "no request"),
        ("a.jsonl", "{broken\n", "is no trace"),
        ("a.jsonl", "[1]\n", "is no object"),
        ("a.json", "{}", "a JSON trace is a list"),
        ("a.json", '[{"conversations": 3}]', "no list of turns"),
        ("a.jsonl", '{"input_toks": 1, "output_toks": NaN}\n', "no number"),
    ],
)
def test_broken_traces_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load_workload(f"{path}:rate=1").build()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fixd", "did you mean fixed"),
        ("fixed:rate", "no SETTING=VALUE"),
        ("fixed:rate=fast", "rate"),
        ("fixed:rate=-1", "rate"),
        ("fixed:rate=.inf", "rate"),
        ("fixed:colour=red", "colour"),
        ("fixed:arrivals=closed", "needs a concurrency"),
        ("fixed:arrivals=trace", "need a trace"),
        ("fixed:prompt_median=2000", "prompt_median is above"),
        ("fixed:prefixes=2", "prefix_tokens"),
        ("fixed:requests=0", "requests"),
        ("fixed:rate=[", "no value"),
    ],
)
def test_wrong_specs_are_refused_in_a_line(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_workload(spec)
    assert "\n" not in str(caught.value)
