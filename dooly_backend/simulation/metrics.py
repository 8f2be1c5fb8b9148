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
from dooly_backend.simulation.records import Numbers, RequestRecord, Run, StepRecord

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
        table = pd.DataFrame([_request_row(record) for record in self.run.requests])
        return table.sort_values(["arrival_s", "id"], ignore_index=True)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per step, in order: when, what was in it, and what it took."""
        return pd.DataFrame([_step_row(step) for step in self.run.steps])

    @cached_property
    def gaps_s(self) -> Numbers:
        """Every distance between two output tokens of a request (ITL)."""
        gaps = [np.diff(record.token_s) for record in self.run.requests]
        return np.concatenate(gaps) if gaps else np.empty(0)

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


def _request_row(record: RequestRecord) -> dict[str, Any]:
    request, tokens = record.request, record.token_s
    if not tokens:
        raise InputError(f"request {request.id} has no output token: a run needs finished requests")
    first, last = tokens[0], tokens[-1]
    return {
        "id": request.id,
        "arrival_s": request.arrival_s,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": len(tokens),
        "cached_tokens": record.cached_tokens,
        "preemptions": record.preemptions,
        "scheduled_s": record.scheduled_s,
        "finish_s": last,
        "queue_s": record.scheduled_s - request.arrival_s,
        "ttft_s": first - request.arrival_s,
        "tpot_s": (last - first) / (len(tokens) - 1) if len(tokens) > 1 else float("nan"),
        "e2e_s": last - request.arrival_s,
    }


def _step_row(step: StepRecord) -> dict[str, Any]:
    query = [scheduled.query for scheduled in step.scheduled]
    context = [scheduled.context for scheduled in step.scheduled]
    decodes = sum(q == 1 and c > 0 for q, c in zip(query, context, strict=True))
    tokens = sum(query)
    return {
        "start_s": step.start_s,
        "end_s": step.end_s,
        "requests": len(query),
        "decodes": decodes,
        "tokens": tokens,
        "prefill_tokens": tokens - decodes,
        "context_tokens": sum(context),
        "preempted": len(step.preempted),
        "device_us": step.time.device_us if step.time else float("nan"),
        "host_us": step.time.host_us if step.time else float("nan"),
        "output_us": step.time.output_us if step.time else float("nan"),
        "extrapolated": step.time.extrapolated if step.time else None,
    }
