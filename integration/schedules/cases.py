"""Random workloads and limits that try every rule of the scheduler."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dooly_backend.regression.clock import ClockResponse
from dooly_backend.simulation.records import (
    Batches,
    KvCacheGroup,
    Run,
    ServingLimits,
    ServingRequest,
    StepTime,
    StepTimes,
)
from dooly_backend.workload import Batch

_TIMES_MORE = 48  # so that a step of eleven tokens warms the device as one of a GPU does


class MadeUpTimer:
    """Times that depend on every length, so that two different steps rarely take the same."""

    def __init__(
        self,
        host_us: float,
        output_us: float,
        launch_us: float = 0.0,
        clock: ClockResponse | None = None,
        stages: int = 1,
    ) -> None:
        self._stages = stages
        self.clock = clock
        self._host_us = host_us
        self._launch_us = launch_us
        self._output_us = output_us

    def time(self, batch: Batch) -> StepTime:
        times = self.times(Batches.of([batch]))
        assert times.launch_us is not None
        return StepTime(
            float(times.device_us[0]),
            float(times.host_us[0]),
            float(times.output_us[0]),
            launch_us=float(times.launch_us[0]),
            tokens=0 if times.tokens is None else int(times.tokens[0]),
            later_us=() if times.later_us is None else tuple(times.later_us[0].tolist()),
        )

    def times(self, batches: Batches) -> StepTimes:
        tokens, requests = batches.total(batches.query), batches.num_reqs
        context = batches.total(batches.context)
        # Whole numbers in binary fractions: sums are exact, in whatever order they are formed.
        device = 500.0 + 8.0 * tokens + context / 64.0 + 2.0 * requests
        # The last stage is the slowest, as the one with the logits often is.
        later = [device / 2 + 128.0 * stage for stage in range(1, self._stages)]
        return StepTimes(
            device,
            self._host_us + 4.0 * requests,
            self._output_us + 1.0 * requests,
            np.zeros(len(batches), np.bool_),
            self._launch_us + 16.0 * requests,
            _TIMES_MORE * tokens,
            np.stack(later, axis=1) if later else None,
        )


@dataclass(frozen=True)
class Case:
    """One workload under one set of limits."""

    requests: tuple[ServingRequest, ...]
    limits: ServingLimits
    timer: MadeUpTimer
    feed: dict[str, Any]  # by_step, concurrency


def random_case(seed: int, version: str = "0.32.0") -> Case:
    """The case of this seed: from two requests to some sixty, most under pressure."""
    rng = random.Random(seed)
    block = rng.choice([4, 8, 16, 32])
    longest = rng.choice([64, 128, 200, 256])
    chunked = rng.random() < 0.8
    seqs = rng.choice([1, 2, 3, 5, 8, 16, 40])
    batched = rng.choice([16, 24, 40, 64, 100, 256]) if chunked else longest + rng.choice([0, 50])
    fits = -(-(longest - 1) // block) + 1  # blocks of the longest request, and the null block
    blocks = fits + rng.choice([0, 1, 2, 5, 10, 40, 400])
    limits = ServingLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=max(batched, seqs),
        max_model_len=longest,
        num_gpu_blocks=blocks,
        block_size=block,
        enable_prefix_caching=rng.random() < 0.7,
        enable_chunked_prefill=chunked,
        async_scheduling=rng.random() < 0.6,
        long_prefill_token_threshold=rng.choice([0, 0, 0, 8, 30]),
        policy=rng.choice(["fcfs", "fcfs", "priority"]),
        watermark=rng.choice([0.0, 0.0, 0.0, 0.05, 0.2]),
        scheduler_reserve_full_isl=rng.random() < 0.8,
        version=version,
    )
    requests = _requests(rng, limits)
    style = rng.choice(["clock", "clock", "step", "closed"])
    feed: dict[str, Any] = {}
    if style == "step":
        feed["by_step"] = True
    elif style == "closed":
        feed["concurrency"] = rng.choice([1, 2, 4, 9])
    timer = MadeUpTimer(
        rng.choice([0.0, 64.0, 900.0]),
        rng.choice([0.0, 32.0]),
        rng.choice([0.0, 800.0]),
        rng.choice([None, None, ClockResponse(0.8, 0.3, 0.004, 700.0)]),
    )
    return Case(requests, limits, timer, feed)


def _requests(rng: random.Random, limits: ServingLimits) -> tuple[ServingRequest, ...]:
    longest = limits.max_model_len
    groups = rng.choice([0, 0, 1, 2, 4])
    prefix_tokens = rng.choice([limits.block_size, 3 * limits.block_size + 1, longest // 2])
    spread = rng.choice([0.0, 0.0, 5.0, 50.0, 400.0])
    short = rng.random() < 0.3
    requests = []
    for identity in range(rng.choice([2, 5, 12, 25, 60])):
        prompt = rng.randint(1, max(1, longest // (8 if short else 2)))
        if rng.random() < 0.1:
            prompt = rng.randint(1, longest - 1)
        output = rng.randint(1, min(longest - prompt, rng.choice([3, 40, longest])))
        shares = groups and rng.random() < 0.8
        requests.append(
            ServingRequest(
                identity,
                # By step these are steps, by the clock units of about a decode step.
                rng.choice([0, 0, 1, 2, rng.random() * spread, rng.random() * spread]),
                prompt,
                output,
                prefix=rng.randrange(groups) if shares else None,
                prefix_tokens=min(prefix_tokens, prompt) if shares else 0,
                priority=rng.choice([0, 0, 1, 2]),
            )
        )
    return tuple(requests)


def grouped_case(seed: int, version: str = "0.32.0") -> Case:
    """As `random_case`, with a window or several KV cache groups of one pool."""
    case = random_case(seed, version)
    rng = random.Random(-seed - 1)
    size = case.limits.block_size
    windows = rng.choice(
        [
            (None, "a"),
            (None, "a"),
            (None, "a", "a", "a"),
            (None, None, "a"),
            ("a",),
            ("a", "b"),
            (None, "a", "b"),
        ]
    )
    length = {name: rng.choice([2, size, size + 1, 3 * size - 1, 70]) for name in "ab"}
    if length["a"] == length["b"]:
        length["b"] += size
    groups = tuple(KvCacheGroup(size, name and length[name]) for name in windows)
    limits = replace(case.limits, kv_groups=groups)
    fits = 1 + sum(limits.most_blocks(group) for group in groups)
    blocks = fits + rng.choice([0, 1, 2, 5, 10, 40, 400])
    return replace(case, limits=replace(limits, num_gpu_blocks=blocks))


def pipeline_case(seed: int, version: str = "0.32.0") -> Case:
    """As `random_case` or `grouped_case`, served by a pipeline."""
    rng = random.Random(-seed - 1000)
    case = rng.choice([random_case, random_case, grouped_case])(seed, version)
    stages = rng.choice([2, 2, 3, 4])
    limits = replace(case.limits, pipeline_parallel=stages)
    timer = MadeUpTimer(
        rng.choice([0.0, 64.0]), rng.choice([0.0, 32.0]), clock=case.timer.clock, stages=stages
    )
    fits = 1 + sum(limits.most_blocks(group) for group in limits.groups)
    blocks = limits.num_gpu_blocks
    if limits.kv_groups:
        blocks = max(blocks, fits)
    return replace(case, limits=replace(limits, num_gpu_blocks=blocks), timer=timer)


def scaled(case: Case) -> Case:
    """By the clock: arrivals in seconds, of which a decode step takes about one in 1024."""
    if case.feed:
        return case
    requests = tuple(
        ServingRequest(**{**vars(request), "arrival_s": request.arrival_s / 1024})
        for request in case.requests
    )
    return Case(requests, case.limits, case.timer, case.feed)


def corner_cases(version: str = "0.32.0") -> list[Case]:
    """Cases that the random ones hardly ever make."""
    limits = ServingLimits(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        num_gpu_blocks=41,
        block_size=4,
        long_prefill_token_threshold=30,
        policy="priority",
        scheduler_reserve_full_isl=False,
        version=version,
    )
    # The first is preempted after it was scheduled: a third prompt gets its part of the step.
    requests = tuple(
        ServingRequest(identity, float(identity > 0), 120, 5, priority=2 * (identity == 0))
        for identity in range(3)
    )
    timer = MadeUpTimer(64.0, 32.0)
    return [
        Case(requests, replace(limits, async_scheduling=waits), timer, {"by_step": True})
        for waits in (False, True)
    ]


def cases(count: int, seed: int = 0, version: str = "0.32.0") -> dict[str, Case]:
    """The corner cases and `count` random ones, by name."""
    corners = {f"corner {i}": case for i, case in enumerate(corner_cases(version))}
    numbers = range(seed, seed + count)
    return corners | {f"case {n}": scaled(random_case(n, version)) for n in numbers}


def pipeline_cases(count: int, seed: int = 0, version: str = "0.32.0") -> dict[str, Case]:
    """`count` random cases with pipelines, by name."""
    numbers = range(seed, seed + count)
    return {f"pipeline {n}": scaled(pipeline_case(n, version)) for n in numbers}


def grouped_cases(count: int, seed: int = 0, version: str = "0.32.0") -> dict[str, Case]:
    """`count` random cases with windows, by name."""
    numbers = range(seed, seed + count)
    return {f"grouped {n}": scaled(grouped_case(n, version)) for n in numbers}


def differences(expected: Run, found: Run) -> list[str]:
    """What differs first between two runs, in words; nothing where they are equal."""
    problems = []
    for index, (a, b) in enumerate(zip(expected.steps, found.steps, strict=False)):
        if a != b:
            problems.append(f"step {index}: {a} is {b}")
            break
    if len(expected.steps) != len(found.steps):
        problems.append(f"{len(expected.steps)} steps are {len(found.steps)}")
    for a, b in zip(expected.requests, found.requests, strict=True):
        if a != b:
            problems.append(f"{a} is {b}")
            break
    return problems
