"""What a run was like: latencies per request, composition per step, and their summary.

Definitions are those that serving benchmarks use (paper section 7.1): TTFT is
from arrival to the first output token, TPOT the mean distance of a request's
output tokens after the first, ITL every such distance on its own, E2E from
arrival to the last token, queueing from arrival to the first step that
computes something of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from dooly_backend.errors import InputError
from dooly_backend.simulation.columns import Requests, Steps
from dooly_backend.simulation.records import Numbers, Run

#: The latencies of a request, and what the tables call them: seconds.
LATENCIES = {"queueing": "queue_s", "ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of many values, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Numbers) -> Spread:
        """Linear interpolation between order statistics. `values` must not be empty."""
        return cls(float(values.mean()), *map(float, np.percentile(values, PERCENTILES)))


@dataclass(frozen=True)
class Summary:
    """A run in a few numbers. Latencies are seconds; None where no request has one."""

    requests: int
    steps: int
    duration_s: float  # from the first arrival to the last token
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompt and output, cached prompt tokens too
    utilisation: float  # share of the duration during which a step runs
    requests_per_step: float
    tokens_per_step: float
    preemptions: int
    cached_share: float  # of the prompt tokens, found in the prefix cache
    extrapolated_share: float | None  # of the steps, outside the profiled range; None: live
    latencies: Mapping[str, Spread | None]  # queueing, ttft, tpot, itl, e2e

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Metrics:
    """The tables of one run. Raises InputError when it finished no request."""

    run: Run

    def __post_init__(self) -> None:
        if not self.run.requests or not self.run.steps:
            raise InputError("the run finished no request: give it requests that fit the limits")

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request, in the order of arrival; times in seconds."""
        return request_table(Requests.of(self.run.requests))

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per step, in order: when, what was in it, and what it took."""
        return step_table(Steps.of(self.run.steps))

    @cached_property
    def gaps_s(self) -> Numbers:
        """Every distance between two output tokens of a request (ITL)."""
        columns = Requests.of(self.run.requests)
        gaps = np.diff(columns.token_s)
        return np.delete(gaps, columns.starts[1:] - 1)  # not from one request to the next

    @cached_property
    def duration_s(self) -> float:
        first = float(self.requests["arrival_s"].min())
        return float(self.requests["finish_s"].max()) - first

    @cached_property
    def summary(self) -> Summary:
        requests, steps = self.requests, self.steps
        prompt, output = requests["prompt_tokens"].sum(), requests["output_tokens"].sum()
        values = {name: requests[column].dropna() for name, column in LATENCIES.items()}
        values["itl"] = pd.Series(self.gaps_s)
        timed = steps["extrapolated"].dropna()
        return Summary(
            requests=len(requests),
            steps=len(steps),
            duration_s=self.duration_s,
            requests_per_s=len(requests) / self.duration_s,
            output_tokens_per_s=float(output / self.duration_s),
            total_tokens_per_s=float((prompt + output) / self.duration_s),
            utilisation=busy_s(steps) / self.duration_s,
            requests_per_step=float(steps["requests"].mean()),
            tokens_per_step=float(steps["tokens"].mean()),
            preemptions=int(requests["preemptions"].sum()),
            cached_share=float(requests["cached_tokens"].sum() / max(prompt, 1)),
            extrapolated_share=float(timed.mean()) if len(timed) else None,
            latencies={
                name: Spread.of(column.to_numpy()) if len(column) else None
                for name, column in values.items()
            },
        )


def busy_s(steps: pd.DataFrame) -> float:
    """Seconds during which at least one step runs; pipelined steps overlap."""
    ordered = steps.sort_values("start_s")
    start, end = ordered["start_s"].to_numpy(), ordered["end_s"].to_numpy()
    reached = np.maximum.accumulate(end)
    before = np.concatenate([[start[0]], reached[:-1]])
    return float(np.maximum(0.0, end - np.maximum(start, before)).sum())


def request_table(columns: Requests) -> pd.DataFrame:
    """See `Metrics.requests`. Raises InputError for a request without an output token."""
    requests = columns.requests
    tokens = np.diff(columns.starts, append=len(columns.token_s))
    if not tokens.all():
        unfinished = requests[int(np.argmin(tokens))].id
        raise InputError(f"request {unfinished} has no output token: a run needs finished requests")
    arrival = np.array([request.arrival_s for request in requests])
    first = columns.token_s[columns.starts]
    last = columns.token_s[columns.starts + tokens - 1]
    table = pd.DataFrame(
        {
            "id": [request.id for request in requests],
            "arrival_s": arrival,
            "prompt_tokens": [request.prompt_tokens for request in requests],
            "output_tokens": tokens,
            "cached_tokens": columns.cached_tokens,
            "preemptions": columns.preemptions,
            "scheduled_s": columns.scheduled_s,
            "finish_s": last,
            "queue_s": columns.scheduled_s - arrival,
            "ttft_s": first - arrival,
            "tpot_s": np.where(tokens > 1, (last - first) / np.maximum(tokens - 1, 1), np.nan),
            "e2e_s": last - arrival,
        }
    )
    return table.sort_values(["arrival_s", "id"], ignore_index=True)


def step_table(columns: Steps) -> pd.DataFrame:
    """See `Metrics.steps`. Predicted times are NaN in a live run."""
    starts, query, context = columns.starts, columns.query, columns.context
    decodes = np.add.reduceat(((query == 1) & (context > 0)).astype(np.int64), starts)
    tokens = np.add.reduceat(query, starts)
    times = columns.times
    unknown = np.full(len(columns), np.nan)
    preempted = np.zeros(len(columns), np.int64)
    for index, ids in columns.preempted.items():
        preempted[index] = len(ids)
    return pd.DataFrame(
        {
            "start_s": columns.start_s,
            "end_s": columns.end_s,
            "requests": np.diff(starts, append=len(query)),
            "decodes": decodes,
            "tokens": tokens,
            "prefill_tokens": tokens - decodes,
            "context_tokens": np.add.reduceat(context, starts),
            "preempted": preempted,
            "device_us": times.device_us if times else unknown,
            "host_us": times.host_us if times else unknown,
            "output_us": times.output_us if times else unknown,
            "extrapolated": times.extrapolated if times else unknown,
        }
    )
