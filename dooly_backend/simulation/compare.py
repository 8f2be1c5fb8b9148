"""A simulation beside live runs of the same requests.

Errors are percent. Where several live runs are given, their mean is the truth
and the error of one of them against another, taken over all pairs, the noise
floor: no simulation can be told to be better than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from dooly_backend.errors import InputError
from dooly_backend.simulation.columns import Steps
from dooly_backend.simulation.metrics import LATENCIES, PERCENTILES, Metrics, step_table
from dooly_backend.simulation.records import Numbers, Run, StepRecord

STATISTICS = ("mean", *(f"p{p}" for p in PERCENTILES))
_COMPARED = ("ttft", "tpot", "e2e")
_QUANTILES = np.linspace(0.5, 99.5, 100)


@dataclass(frozen=True)
class Comparison:
    """Live runs, and a simulation of their requests."""

    live: Sequence[Metrics]
    simulated: Metrics

    def __post_init__(self) -> None:
        if not self.live:
            raise InputError("a comparison needs at least one live run")
        ids = set(self.simulated.requests["id"])
        for metrics in self.live:
            if set(metrics.requests["id"]) != ids:
                raise InputError("the live run and the simulation served different requests")

    @cached_property
    def latencies(self) -> pd.DataFrame:
        """By latency and statistic: live and simulated seconds, error and noise in percent."""
        rows = []
        for name in _COMPARED:
            column = LATENCIES[name]
            for statistic in STATISTICS:
                truth = [_statistic(m.requests[column], statistic) for m in self.live]
                found = _statistic(self.simulated.requests[column], statistic)
                rows.append({"latency": name, "statistic": statistic, **errors(truth, found)})
        return pd.DataFrame(rows).set_index(["latency", "statistic"])

    @cached_property
    def throughput(self) -> dict[str, float]:
        """Output tokens per second, as a row of `latencies`."""
        truth = [m.summary.output_tokens_per_s for m in self.live]
        return errors(truth, self.simulated.summary.output_tokens_per_s)

    def mape(self, latency: str) -> float:
        """Mean over the statistics of the absolute error of `latency`, percent."""
        return float(self.latencies.loc[latency, "error"].abs().mean())

    def noise(self, latency: str) -> float:
        """The same of one live run against another; NaN with a single live run."""
        return float(self.latencies.loc[latency, "noise"].mean())

    def mape_of_requests(self, latency: str) -> float:
        """Mean over the requests of the absolute error of each one's `latency`, percent."""
        return float(np.nanmean(relative(self._mean(latency), _by_id(self.simulated, latency))))

    def noise_of_requests(self, latency: str) -> float:
        """The same of one live run against another; NaN with a single live run."""
        pairs = combinations([_by_id(m, latency) for m in self.live], 2)
        return _mean_or_nan([float(np.nanmean(between(a, b))) for a, b in pairs])

    def _mean(self, latency: str) -> Numbers:
        return np.mean([_by_id(m, latency) for m in self.live], axis=0)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Tokens and requests per step, and step times, compared as distributions.

        On the wall clock two runs do not have the same steps, not even two
        live ones; how large their steps are can be compared all the same: the
        mean absolute error over 100 quantiles.
        """
        rows = {}
        for name, values in _STEP_VALUES.items():
            truth = [np.percentile(values(m), _QUANTILES) for m in self.live]
            found = np.percentile(values(self.simulated), _QUANTILES)
            pairs = [float(np.mean(between(a, b))) for a, b in combinations(truth, 2)]
            rows[name] = {
                "live": float(np.mean([values(m).mean() for m in self.live])),
                "simulated": float(values(self.simulated).mean()),
                "mape": float(np.mean(relative(np.mean(truth, axis=0), found))),
                "noise": _mean_or_nan(pairs),
            }
        return pd.DataFrame(rows).T


_STEP_VALUES: dict[str, Callable[[Metrics], Any]] = {
    "tokens": lambda m: m.steps["tokens"].to_numpy(float),
    "requests": lambda m: m.steps["requests"].to_numpy(float),
    "milliseconds": lambda m: ((m.steps["end_s"] - m.steps["start_s"]) * 1e3).to_numpy(),
}


def errors(truth: Sequence[float], found: float) -> dict[str, float]:
    """Their mean beside `found`: signed error and noise in percent."""
    live = float(np.mean(truth))
    pairs = [float(between(a, b)) for a, b in combinations(truth, 2)]
    return {
        "live": live,
        "simulated": found,
        "error": (found / live - 1) * 100 if live else float("nan"),
        "noise": _mean_or_nan(pairs),
    }


def relative(truth: Any, found: Any) -> Any:
    """Absolute error of `found` in percent; NaN where the truth is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.abs(np.asarray(found) / np.asarray(truth) - 1) * 100
    return np.where(np.isfinite(error), error, np.nan)


def between(one: Any, other: Any) -> Any:
    """Absolute difference of two equals in percent of their mean."""
    return relative((np.asarray(one) + np.asarray(other)) / 2, np.asarray(one)) * 2


def _by_id(metrics: Metrics, latency: str) -> Numbers:
    return metrics.requests.sort_values("id")[LATENCIES[latency]].to_numpy(float)


def _statistic(values: pd.Series, name: str) -> float:
    known = values.dropna().to_numpy()
    if not len(known):
        return float("nan")
    return float(known.mean() if name == "mean" else np.percentile(known, int(name[1:])))


def _mean_or_nan(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


# -- schedules ------------------------------------------------------------------


def schedule_agreement(live: Run, simulated: Run) -> float:
    """Percent of the steps, one by one from the first, that compute the same.

    Two steps are equal when the same requests compute as many tokens after the
    same context and the same requests were preempted. Steps that only one run
    has count as different.
    """
    pairs = zip(live.steps, simulated.steps, strict=False)
    equal = sum(_contents(one) == _contents(other) for one, other in pairs)
    return 100.0 * equal / max(len(live.steps), len(simulated.steps), 1)


def first_difference(live: Run, simulated: Run) -> int | None:
    """The first step that differs, or None."""
    for index, (one, other) in enumerate(zip(live.steps, simulated.steps, strict=False)):
        if _contents(one) != _contents(other):
            return index
    shorter = min(len(live.steps), len(simulated.steps))
    return shorter if len(live.steps) != len(simulated.steps) else None


def _contents(step: StepRecord) -> tuple[frozenset[Any], frozenset[int]]:
    return frozenset(step.scheduled), frozenset(step.preempted)


def step_errors(steps: Sequence[StepRecord], predicted_us: Numbers) -> pd.DataFrame:
    """Live steps beside what was predicted for exactly their batches, milliseconds and percent.

    Nothing of the schedule is in it: this is the error of the step times alone.
    """
    table = step_table(Steps.of(steps))
    live = (table["end_s"] - table["start_s"]) * 1e3
    kinds = np.where(table["prefill_tokens"] > 0, "prefill", "decode")
    found = predicted_us / 1e3
    return pd.DataFrame(
        {"kind": kinds, "live_ms": live, "predicted_ms": found, "error": (found / live - 1) * 100}
    )
