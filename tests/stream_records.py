"""Steps in a row that follow a made truth, for tests of what is fitted to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from dooly_backend.database import Database
from dooly_backend.database.records import HostStep, PartCost, StepMode, StreamStep
from dooly_backend.profiling.stream_batches import STREAM_BATCHES
from dooly_backend.regression.bundle import Bundle
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.regression.clock import HEAVY_TOKENS
from dooly_backend.regression.step_operations import Operations, step_operations
from dooly_backend.regression.store_cost import store_stream_cost
from dooly_backend.regression.stream_cost import time_us
from dooly_backend.simulation.execution import Execution, capture_sizes
from dooly_backend.workload import Batch
from tests.sample_records import ATTENTION, LINEAR, ROPE, SAMPLER, at, store

SIZES = capture_sizes(256, 8192, "0.25.1")
RULE = Execution("FULL_AND_PIECEWISE", SIZES, 256)
NAMES: dict[int, StepMode] = {0: "eager", 1: "piecewise", 2: "full"}

#: An H200's, about: microseconds.
TRUTH = {
    ("full", "device"): PartCost("full", "device", share=0.92, step_us=40.0),
    ("full", "launch"): PartCost("full", "launch", step_us=1300.0, layer_us=20.0, request_us=1.5),
    ("piecewise", "device"): PartCost("piecewise", "device", share=0.94, step_us=90.0),
    ("piecewise", "launch"): PartCost(
        "piecewise", "launch", step_us=900.0, layer_us=60.0, request_us=1.5
    ),
    ("eager", "device"): PartCost("eager", "device", share=0.97),
    ("eager", "launch"): PartCost(
        "eager", "launch", step_us=1800.0, layer_us=520.0, request_us=1.5
    ),
}


def by_hand(batch: Batch, layers: int) -> Operations:
    """Some sum of operations, of it attention what reads the cache."""
    read = sum(request.query + request.context for request in batch.requests)
    attention = layers * 0.002 * read
    return Operations(attention + layers * (140 + 0.8 * batch.num_tokens) + 350, attention)


def shown(batch: Batch, layers: int, times: Callable[[float], float]) -> StreamStep:
    """What a stream of `batch` takes by TRUTH; `times` disturbs a time."""
    longest = max(request.query for request in batch.requests)
    numbers = (np.array([n]) for n in (batch.num_tokens, batch.num_reqs, longest))
    mode, padded = RULE.modes(*numbers)
    name = NAMES[int(mode[0])]
    device = time_us(TRUTH[name, "device"], by_hand(batch, layers))
    launch = time_us(TRUTH[name, "launch"], layers=layers, requests=batch.num_reqs)
    interval = tuple(times(max(device, launch)) for _ in range(5))
    return StreamStep(
        batch, layers, name, int(padded[0]), interval, tuple(times(launch) for _ in range(5))
    )


def steps(times: Callable[[float], float] = float) -> list[StreamStep]:
    return [shown(batch, layers, times) for layers in (4, 32) for batch in STREAM_BATCHES]


def by_part(costs: Sequence[PartCost]) -> dict[tuple[str, str], PartCost]:
    return {(cost.mode, cost.part): cost for cost in costs}


#: What passes before an idle device begins: a whole graph is launched first.
WAITS = {"full": 700.0, "piecewise": 400.0, "eager": 450.0}
GRAPH_LAYER_US = 15.0  # of a whole graph, beside what WAITS has


def with_lone_steps(measured: Sequence[StreamStep], noise: random.Random) -> list[StreamStep]:
    """The steps, each alone as well: heavy ones at the higher clock of a rested device."""
    found = []
    for step in measured:
        device = time_us(TRUTH[step.mode, "device"], by_hand(step.batch, step.num_layers))
        launch = time_us(
            TRUTH[step.mode, "launch"], layers=step.num_layers, requests=step.batch.num_reqs
        )
        before = WAITS[step.mode] + (step.mode == "full") * GRAPH_LAYER_US * step.num_layers
        device *= 0.88 if step.batch.num_tokens >= HEAVY_TOKENS else 1.0
        lone = max(before + device, launch)
        found.append(replace(step, alone_us=tuple(lone * noise.gauss(1, 0.005) for _ in range(5))))
    return found


def operations(measured: Sequence[StreamStep]) -> list[Operations]:
    return [by_hand(step.batch, step.num_layers) for step in measured]


MEASURED = {
    ROPE: [at("constant", 5.0)],
    LINEAR: [at(f"tokens={n}", 50 + n / 4) for n in (1, 64, 512, 8192)],
    SAMPLER: [at("requests=1", 30.0), at("requests=256", 90.0)],
    ATTENTION: [
        at(f"batch={text}", us)
        for text, us in {
            "1x64+0": 12.0,
            "1x8192+0": 900.0,
            "1x64+4096": 30.0,
            "1x4096+4096": 700.0,
            "1x1+64": 6.0,
            "1x1+8192": 25.0,
            "256x1+64": 40.0,
            "256x1+4096": 1200.0,
        }.items()
    ],
}
HOSTS = [HostStep(n, (100.0 + 2 * n,), (40.0 + n,)) for n in (1, 16, 256)]


def fill(database: Database) -> tuple[tuple[int, int], Bundle]:
    """Steps that follow TRUTH beyond what the bundle predicts; fitted and stored."""
    ids = store(database, MEASURED, execution_mode="full_graph")
    each = fit_bundle(database).configurations[0]
    plain = [replace(step, interval_us=(1.0,)) for step in steps()]
    sums = step_operations(each.configuration, each.occurrences, each.predictors, plain)
    for step, us in zip(plain, sums, strict=True):
        device = time_us(TRUTH[step.mode, "device"], us)
        interval = max(device, step.launch_median_us)
        database.record_stream_step(*ids, replace(step, interval_us=(interval,)))
    for host in HOSTS:
        database.record_host_step(*ids, host)
    store_stream_cost(database, ids)
    return ids, fit_bundle(database)
