"""Our scheduler against vLLM's own on random cases: every step, every time, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dooly_backend.errors import InputError
from dooly_backend.simulation.records import KvCacheGroup, ServingLimits, ServingRequest
from dooly_backend.simulation.scheduler import OneByOne, simulate
from integration.schedules.cases import Case, MadeUpTimer, differences, grouped_cases
from integration.schedules.cases import cases as make_cases
from integration.schedules.equal import compare, vllm_version

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ServingLimits(8, 64, 256, 40, 16, async_scheduling=True)
TIMER = MadeUpTimer(64.0, 32.0)
FULL = KvCacheGroup(16)
CHUNKED = KvCacheGroup(16, unmodelled="ChunkedLocalAttentionSpec")


@pytest.mark.engine
def test_equal_to_vllm_on_random_cases(needs_engine: None) -> None:
    counts: Counter[str] = Counter()
    for name, case in make_cases(140, version=vllm_version()).items():
        assert not compare(case, counts, Counter()), name
    # Otherwise the cases would not try much.
    assert counts["steps"] > 20_000
    assert counts["with_preemptions"] > 30
    assert counts["with_cached_tokens"] > 30


@pytest.mark.engine
def test_equal_to_vllm_with_several_groups_and_windows(needs_engine: None) -> None:
    counts: Counter[str] = Counter()
    for name, case in grouped_cases(80, version=vllm_version()).items():
        assert not compare(case, counts, Counter()), name
    assert counts["steps"] > 20_000
    assert counts["with_preemptions"] > 15
    assert counts["with_cached_tokens"] > 12


@pytest.mark.parametrize("make", [make_cases, grouped_cases])
@pytest.mark.parametrize("version", ["0.25.1", "0.32.0"])
def test_many_steps_at_once_are_those_taken_one_by_one(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., dict[str, Case]], version: str
) -> None:
    cases = list(make(100, version=version).values())
    fast = [simulate(c.requests, c.limits, c.timer, **c.feed) for c in cases]
    monkeypatch.setattr("dooly_backend.simulation.fast._Simulation._stride", lambda self: False)
    for case, run in zip(cases, fast, strict=True):
        slow = simulate(case.requests, case.limits, case.timer, **case.feed)
        assert not differences(slow, run)


def test_old_rules_differ_where_one_request_is_alone() -> None:
    limits = replace(LIMITS, long_prefill_token_threshold=20)
    request = [ServingRequest(0, 0.0, 100, 1)]
    first = [
        simulate(request, replace(limits, version=version), TIMER).steps[0].scheduled[0].query
        for version in ("0.25.1", "0.32.0")
    ]
    assert first == [20, 64]


def test_a_window_holds_less_than_full_attention() -> None:
    requests = [ServingRequest(i, 0.0, 64, 160) for i in range(4)]
    limits = replace(LIMITS, num_gpu_blocks=41, enable_prefix_caching=False)
    windows = (KvCacheGroup(16, 32), KvCacheGroup(16, 32))
    alone = simulate(requests, limits, TIMER)
    full = simulate(requests, replace(limits, kv_groups=(FULL, FULL)), TIMER)
    windowed = simulate(requests, replace(limits, kv_groups=windows), TIMER)
    preempted = [sum(r.preemptions for r in run.requests) for run in (alone, full, windowed)]
    # 14 blocks a request and group, of which a window holds four.
    assert preempted[0] > 0
    assert preempted[1] > preempted[0]
    assert preempted[2] == 0


def test_a_prefix_is_found_as_far_as_every_group_has_it() -> None:
    # The first prompt ends at 100: its window of two blocks is kept before token 96 alone.
    requests = [
        ServingRequest(0, 0.0, 100, 2, prefix=1, prefix_tokens=100),
        ServingRequest(1, 1.0, 100, 2, prefix=1, prefix_tokens=100),
        ServingRequest(2, 2.0, 100, 2, prefix=1, prefix_tokens=80),
        ServingRequest(3, 3.0, 100, 2, prefix=1, prefix_tokens=80),
    ]
    cached = {}
    for version in ("0.25.1", "0.32.0"):
        limits = replace(LIMITS, kv_groups=(FULL, KvCacheGroup(16, 33)), version=version)
        run = simulate(requests, limits, TIMER)
        cached[version] = [request.cached_tokens for request in run.requests]
    assert cached["0.25.1"] == [0, 96, 80, 80]
    # The third finds 80 tokens in the full group, none in the other, and keeps them for the next.
    assert cached["0.32.0"] == [0, 96, 0, 80]


def test_a_timer_of_one_step_at_a_time_will_do() -> None:
    class Single:
        time = TIMER.time

    requests = [ServingRequest(i, i / 100, 60, 20) for i in range(10)]
    assert not differences(simulate(requests, LIMITS, TIMER), simulate(requests, LIMITS, Single()))
    assert OneByOne(Single()).time == Single.time


@pytest.mark.parametrize(
    ("request_", "limits", "message"),
    [
        (ServingRequest(0, 0, 250, 10), {}, "has 260 tokens with its output"),
        (ServingRequest(0, 0, 0, 10), {}, "no prompt or no output"),
        (
            ServingRequest(0, 0, 200, 50),
            {"num_gpu_blocks": 10},
            "16 blocks, and the KV cache holds 9",
        ),
        (ServingRequest(0, 0, 80, 5), {"enable_chunked_prefill": False}, "chunked prefill"),
        (ServingRequest(0, 0, 8, 5), {"policy": "shortest"}, "policy"),
        (ServingRequest(0, 0, 8, 5), {"max_num_batched_tokens": 7}, "max_num_batched_tokens"),
        (ServingRequest(0, 0, 8, 5), {"num_gpu_blocks": 0}, "num_gpu_blocks"),
        (ServingRequest(0, 0, 200, 50), {"kv_groups": (FULL, FULL, FULL)}, "take 48 blocks"),
        (ServingRequest(0, 0, 8, 5), {"kv_groups": (FULL, KvCacheGroup(32, 64))}, "16, 32 tokens"),
        (ServingRequest(0, 0, 8, 5), {"kv_groups": (KvCacheGroup(16, 1),)}, "windows 2 or more"),
        (ServingRequest(0, 0, 8, 5), {"kv_groups": (CHUNKED,)}, "ChunkedLocalAttentionSpec is not"),
    ],
)
def test_what_cannot_be_served_is_refused(
    request_: ServingRequest, limits: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        simulate([request_], replace(LIMITS, **limits), TIMER)  # type: ignore[arg-type]


def test_wrong_feeds_are_refused() -> None:
    one = ServingRequest(0, 0, 8, 5)
    for requests, feed, message in (
        ([one, one], {}, "same id"),
        ([one], {"concurrency": 0}, "serves nothing"),
        ([one], {"concurrency": 1, "by_step": True}, "closed loop"),
    ):
        with pytest.raises(InputError, match=message):
            simulate(requests, LIMITS, TIMER, **feed)  # type: ignore[arg-type]


def test_neither_torch_nor_an_engine_is_imported() -> None:
    program = (
        "import sys; import integration.benchmarks.simulate; "
        "sys.exit(bool({'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_no_requests_make_an_empty_run() -> None:
    run = simulate([], LIMITS, TIMER)
    assert (len(run.steps), len(run.requests)) == (0, 0)
