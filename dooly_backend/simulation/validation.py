"""The same requests on a live engine and in simulation, and how far they are apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import nan
from typing import Any

import numpy as np
import pandas as pd

from dooly_backend.engines.serving import Server
from dooly_backend.profiling.watch import CpuWatch
from dooly_backend.simulation import live
from dooly_backend.simulation.calibrate import calibrated
from dooly_backend.simulation.compare import Comparison, schedule_agreement, step_errors
from dooly_backend.simulation.metrics import Metrics
from dooly_backend.simulation.records import Run, ServingLimits, StepTimer
from dooly_backend.simulation.replay import batches, replayed
from dooly_backend.simulation.scheduler import SchedulerName, simulate
from dooly_backend.simulation.step_time import StepModel
from dooly_backend.simulation.workload import Workload

Say = Callable[[str], None]

_WARM_UP_REQUESTS = 4
OTHERS = "others_busy_processors"


@dataclass(frozen=True)
class Validation:
    """One workload: live runs, its simulation, and simulations that know less.

    `profile_only` has the step cost of the profile instead of a calibrated one,
    `forward_only` none.
    """

    workload: Workload
    live: Sequence[Run]
    simulated: Run
    profile_only: Run
    forward_only: Run
    timer: StepModel
    scheduler: SchedulerName = "dooly"

    @cached_property
    def comparison(self) -> Comparison:
        return Comparison([Metrics(run) for run in self.live], Metrics(self.simulated))

    @cached_property
    def profile_comparison(self) -> Comparison:
        return Comparison(self.comparison.live, Metrics(self.profile_only))

    @cached_property
    def forward_comparison(self) -> Comparison:
        return Comparison(self.comparison.live, Metrics(self.forward_only))

    @cached_property
    def agreements(self) -> list[float]:
        """Of each live run, percent of its steps that its replay schedules alike."""
        return [schedule_agreement(run, replayed(run, self.scheduler)) for run in self.live]

    @cached_property
    def steps(self) -> pd.DataFrame:
        """All live steps beside what is predicted for their batches (`step_errors`)."""
        return pd.concat(
            [step_errors(run.steps, self.timer.times(batches(run)).device_us) for run in self.live],
            ignore_index=True,
        )

    def figures(self) -> dict[str, Any]:
        """What the JSON output says; percent, NaN as None."""
        found, forward, profile = self.comparison, self.forward_comparison, self.profile_comparison
        values: dict[str, Any] = {
            "ttft_mape": found.mape("ttft"),
            "tpot_mape": found.mape("tpot"),
            "throughput_error": abs(found.throughput["error"]),
            "schedule_agreement": min(self.agreements),
            "ttft_noise": found.noise("ttft"),
            "tpot_noise": found.noise("tpot"),
            "throughput_noise": found.throughput["noise"],
            "ttft_mape_requests": found.mape_of_requests("ttft"),
            "tpot_mape_requests": found.mape_of_requests("tpot"),
            "ttft_noise_requests": found.noise_of_requests("ttft"),
            "tpot_noise_requests": found.noise_of_requests("tpot"),
            "ttft_mape_profile_only": profile.mape("ttft"),
            "tpot_mape_profile_only": profile.mape("tpot"),
            "ttft_mape_forward_only": forward.mape("ttft"),
            "tpot_mape_forward_only": forward.mape("tpot"),
            "step_tokens_mape": found.steps.loc["tokens", "mape"],
            "step_requests_mape": found.steps.loc["requests", "mape"],
            "step_tokens_noise": found.steps.loc["tokens", "noise"],
            "step_requests_noise": found.steps.loc["requests", "noise"],
            "step_time_mape": self.steps["error"].abs().mean(),
            "step_time_bias": (self.steps["predicted_ms"].sum() / self.steps["live_ms"].sum() - 1)
            * 100,
            OTHERS: max((o for o in map(others_busy, self.live) if o is not None), default=nan),
        }
        return {name: plain(value) for name, value in values.items()}

    @property
    def name(self) -> str:
        """The workload and, where it has one, its rate."""
        rate = self.workload.rate
        timed = self.workload.arrivals in ("poisson", "uniform", "bursty") and rate
        return f"{self.workload.name}, {rate:.3g} requests/s" if timed else self.workload.name


def plain(value: Any) -> float | None:
    """A number that JSON takes: NaN becomes None."""
    number = float(value)
    return round(number, 4) if np.isfinite(number) else None


_WORST: Mapping[str, Callable[[Any], Any]] = {"schedule_agreement": min, OTHERS: max}


def overall(validations: Sequence[Validation]) -> dict[str, Any]:
    """Means over the workloads; of the schedule's agreement the least, of other work the most."""
    figures = [validation.figures() for validation in validations]
    result: dict[str, Any] = {}
    for name in figures[0]:
        known = [f[name] for f in figures if f[name] is not None]
        take = _WORST.get(name, np.mean)
        result[name] = plain(take(known)) if known else None
    return result


def validate(
    server: Server,
    timer: StepModel,
    workloads: Sequence[Workload],
    runs: int,
    *,
    calibrating: Sequence[Run] = (),
    scheduler: SchedulerName = "dooly",
    say: Say = lambda _: None,
) -> list[Validation]:
    """Serve every workload `runs` times, in turns, and simulate it under the server's limits.

    In turns, so that a disturbance of minutes does not hit one workload alone.
    The server must be warm (`warm_up`); `calibrating` is as in `compared`.
    """
    served: list[list[Run]] = [[] for _ in workloads]
    for turn in range(runs):
        for index, workload in enumerate(workloads):
            say(f"serving {workload.name}, run {turn + 1} of {runs}")
            served[index].append(serve(server, workload))
    return [
        compared(workload, live_runs, timer, calibrating, scheduler)
        for workload, live_runs in zip(workloads, served, strict=True)
    ]


def warm_up(server: Server, workloads: Sequence[Workload]) -> None:
    """Serve a few requests of each, so that what is compiled at first use is compiled."""
    for workload in workloads:
        live.warm_up(server, workload.build()[:_WARM_UP_REQUESTS])


def serve(server: Server, workload: Workload) -> Run:
    """One live run. Its `about` says how many processors other processes kept busy meanwhile."""
    watch = CpuWatch(threads=1)
    requests = workload.build()
    watch.begin()
    run = live.serve(server, requests, concurrency=workload.concurrency)
    others = watch.end().others
    if others is None:  # the system does not tell
        return run
    return replace(run, about={**run.about, OTHERS: round(others, 3)})


def others_busy(run: Run) -> float | None:
    """Processors that other processes kept busy during a live run, where that is known.

    Of an engine on a CPU that runs in one process: others slow it down, and most
    where a processor is one thread of a core that they share (by 2.1 on one host).
    """
    found = run.about.get(OTHERS)
    return None if found is None else float(found)


def compared(
    workload: Workload,
    served: Sequence[Run],
    timer: StepModel,
    calibrating: Sequence[Run] = (),
    scheduler: SchedulerName = "dooly",
) -> Validation:
    """Live runs of `workload` beside its simulation under the same limits.

    The step's own cost is fitted to `calibrating`, runs of other requests.
    """
    limits = served[0].limits
    if limits is None:
        raise ValueError("a live run without limits cannot be simulated")
    best = with_host(timer, calibrating)
    simulated, profile_only, forward_only = (
        simulate(workload.build(), limits, each, scheduler, concurrency=workload.concurrency)
        for each in (best, timer, timer.forward_only())
    )
    return Validation(workload, served, simulated, profile_only, forward_only, best, scheduler)


def with_host(timer: StepModel, calibrating: Sequence[Run]) -> StepModel:
    """The step's own cost fitted to `calibrating`; the profile's where there are no runs."""
    return timer.with_cost(calibrated(calibrating, timer)) if calibrating else timer


def calibration_workloads(
    seconds: float, load: float, limits: ServingLimits, timer: StepTimer, **how: Any
) -> tuple[Workload, Workload]:
    """Requests of many lengths, other than any that a user names, for about so many seconds.

    Half of them come as at `load`, one by one: single prompts beside decodes. The
    others come all at once: their prompts fill the steps, and then as many decode
    as the engine takes, fewer and fewer. A cost that is fitted to both has seen
    batches of every size.
    """
    longest = min(limits.max_model_len, 1024)
    mixed = Workload(
        name="calibration",
        requests=100,
        prompt=max(longest // 5, 2),
        prompt_median=max(longest // 10, 1),
        output=48,
        output_median=32,
        longest=longest,
        rate=1.0,
        seed=104729,
    )
    capacity = at_load(mixed, 1.0, limits, timer, **how).rate or 1.0
    requests = max(round(capacity * seconds / 2), 6)
    at_rate = mixed.model_copy(
        update={"rate": load * capacity, "requests": max(round(load * requests), 6)}
    )
    at_once = mixed.model_copy(
        update={
            "name": "calibration-at-once",
            "arrivals": "burst",
            "rate": None,
            "requests": requests,
            "seed": 130363,
        }
    )
    return at_rate, at_once


def at_load(
    workload: Workload, load: float, limits: ServingLimits, timer: StepTimer, **how: Any
) -> Workload:
    """`workload` at a rate that is the part `load` of what the simulated engine can do.

    That is its throughput when all requests come at once.
    """
    requests = [replace(request, arrival_s=0.0) for request in workload.build()]
    summary = Metrics(simulate(requests, limits, timer, **how)).summary
    rate = float(f"{load * summary.requests_per_s:.3g}")
    return workload.model_copy(update={"rate": rate})


def table_rows(validation: Validation) -> list[Mapping[str, Any]]:
    """The latencies' table and the throughput, for people: milliseconds and percent."""
    rows: list[Mapping[str, Any]] = []
    for (latency, statistic), row in validation.comparison.latencies.iterrows():
        key = (latency, statistic)
        rows.append(
            {
                "what": f"{latency.upper()} {statistic}, ms",
                "live": row["live"] * 1e3,
                "simulated": row["simulated"] * 1e3,
                "error": row["error"],
                "noise": row["noise"],
                "profile_only": validation.profile_comparison.latencies.loc[key, "error"],
                "forward_only": validation.forward_comparison.latencies.loc[key, "error"],
            }
        )
    throughput = validation.comparison.throughput
    less = {
        "profile_only": validation.profile_comparison.throughput["error"],
        "forward_only": validation.forward_comparison.throughput["error"],
    }
    rows.append({"what": "output tokens/s", **throughput, **less})
    for name, row in validation.comparison.steps.iterrows():
        unit = ", ms" if name == "milliseconds" else ""
        what = "time" if name == "milliseconds" else name
        rows.append(
            {
                "what": f"{what} of a step{unit}",
                "live": row["live"],
                "simulated": row["simulated"],
                "error": (row["simulated"] / row["live"] - 1) * 100,
                "noise": row["noise"],
                "profile_only": float("nan"),
                "forward_only": float("nan"),
            }
        )
    return rows
