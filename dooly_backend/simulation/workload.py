"""Workloads: how many requests, how long, and when they come.

A workload is described in a line (``paper-small:requests=200,rate=2``) or in a
YAML file, and gives the same requests wherever it is read: lengths, arrivals
and prefixes are drawn from generators of their own, so that another rate leaves
the lengths as they are.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import yaml
from pydantic import Field, field_validator, model_validator

from dooly_backend.config import (
    Description,
    NaturalInt,
    PositiveInt,
    configs_folder,
    read_yaml,
    unknown_name,
    validated,
)
from dooly_backend.errors import InputError
from dooly_backend.simulation.records import ServingRequest
from dooly_backend.simulation.traces import TraceRow, read_trace

ArrivalKind = Literal["poisson", "uniform", "bursty", "burst", "closed", "trace"]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_TRACES = (".csv", ".json", ".jsonl")
_LENGTHS, _ARRIVALS, _PREFIXES = range(3)  # a generator each


class Workload(Description):
    """A stream of requests.

    `prompt` and `output` are lengths in tokens: of every request, or their mean
    where a median is given, too; then they are log-normal. arrivals: "poisson"
    and "uniform" at `rate` requests per second, "bursty" the same in bursts of
    `burst` that come as a Poisson process, "burst" all at once, "closed" with
    `concurrency` requests at any time, "trace" as the trace says.
    """

    name: str = "workload"
    requests: PositiveInt = 100  # of a trace: at most so many
    prompt: PositiveInt = 1024
    prompt_median: PositiveInt | None = None
    output: PositiveInt = 128
    output_median: PositiveInt | None = None
    longest: PositiveInt | None = None  # tokens of a request with its output; longer ones are cut
    trace: Path | None = None  # lengths from this file
    arrivals: ArrivalKind = "poisson"
    rate: PositiveFloat | None = None
    burst: PositiveInt = 8
    concurrency: PositiveInt | None = None
    prefixes: NaturalInt = 0  # groups of requests that share a prefix; 0: none does
    prefix_tokens: NaturalInt = 0
    seed: NaturalInt = 0

    @field_validator("rate", mode="before")
    @classmethod
    def _whole_rate(cls, value: Any) -> Any:
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        for which in ("prompt", "output"):
            median = getattr(self, f"{which}_median")
            if median is not None and median > getattr(self, which):
                raise ValueError(
                    f"{which}_median is above the mean: log-normal lengths have it below"
                )
        if self.arrivals in ("poisson", "uniform", "bursty") and self.rate is None:
            raise ValueError(f"arrivals {self.arrivals!r} need a rate, in requests per second")
        if self.arrivals == "closed" and self.concurrency is None:
            raise ValueError("a closed loop needs a concurrency")
        if self.arrivals == "trace" and self.trace is None:
            raise ValueError("arrivals 'trace' need a trace")
        if self.prefixes and not self.prefix_tokens:
            raise ValueError("prefixes need prefix_tokens: how many tokens they share")
        return self

    def build(self) -> list[ServingRequest]:
        """The requests, in the order in which they come. Raises InputError for a bad trace."""
        rows = read_trace(self.trace) if self.trace else None
        count = self.requests if rows is None else min(self.requests, len(rows))
        prompts, outputs = self._lengths(count, rows)
        arrivals = self._arrivals(count, rows)
        groups = self._generator(_PREFIXES).integers(0, max(self.prefixes, 1), count)
        return [
            ServingRequest(
                id=index,
                arrival_s=float(arrivals[index]),
                prompt_tokens=prompts[index],
                output_tokens=outputs[index],
                prefix=int(groups[index]) if self.prefixes else None,
                prefix_tokens=min(self.prefix_tokens, prompts[index]) if self.prefixes else 0,
            )
            for index in range(count)
        ]

    def _generator(self, stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, stream))

    def _lengths(self, count: int, rows: list[TraceRow] | None) -> tuple[list[int], list[int]]:
        if rows is None:
            generator = self._generator(_LENGTHS)
            prompts = _lengths(generator, self.prompt, self.prompt_median, count)
            outputs = _lengths(generator, self.output, self.output_median, count)
        else:
            prompts = [row.prompt_tokens for row in rows[:count]]
            outputs = [row.output_tokens for row in rows[:count]]
        if self.longest is not None:
            outputs = [min(length, max(self.longest // 2, 1)) for length in outputs]
            room = [max(self.longest - length, 1) for length in outputs]
            prompts = [min(length, most) for length, most in zip(prompts, room, strict=True)]
        return prompts, outputs

    def _arrivals(self, count: int, rows: list[TraceRow] | None) -> Any:
        """Seconds at which the requests come, in increasing order, the first one at 0."""
        if self.arrivals == "trace":
            assert rows is not None
            times = [row.arrival_s for row in rows[:count]]
            if any(time is None for time in times):
                raise InputError(f"{self.trace} does not say when requests come: give a rate")
            return np.asarray(times, float) - min(float(time or 0) for time in times)
        if self.rate is None or self.arrivals in ("burst", "closed"):
            return np.zeros(count)
        if self.arrivals == "uniform":
            return np.arange(count) / self.rate
        size = self.burst if self.arrivals == "bursty" else 1
        bursts = -(-count // size)
        gaps = self._generator(_ARRIVALS).exponential(size / self.rate, bursts)
        return np.repeat(np.cumsum(gaps) - gaps[0], size)[:count]


def _lengths(
    generator: np.random.Generator, mean: int, median: int | None, count: int
) -> list[int]:
    """Lengths in tokens: all `mean`, or log-normal with that mean and `median`."""
    if median is None:
        return [mean] * count
    # Of a log-normal, the median is exp(mu) and the mean exp(mu + sigma^2 / 2).
    sigma = math.sqrt(2 * math.log(mean / median))
    drawn = generator.lognormal(math.log(median), sigma, count)
    return [max(1, round(length)) for length in drawn]


def known_workloads() -> dict[str, Path]:
    """The shipped workloads by name."""
    folder = configs_folder() / "workloads"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_workload(text: str) -> Workload:
    """The workload that `text` means: ``NAME[:SETTING=VALUE,...]``.

    NAME is one of `known_workloads`, a YAML file with the settings, or a trace
    (CSV, JSON or JSONL, as `traces.read_trace` reads). Raises InputError.
    """
    name, settings = _split(text)
    values = {**_named(name), **settings}
    if "arrivals" not in settings:
        if "concurrency" in settings:
            values["arrivals"] = "closed"
        elif "rate" in settings and values.get("arrivals") == "trace":
            values["arrivals"] = "poisson"
    return validated(Workload, values, f"workload {text!r}")


def _split(text: str) -> tuple[str, dict[str, Any]]:
    name, _, rest = text.partition(":")
    settings: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError(f"{part!r} in workload {text!r} is no SETTING=VALUE (rate=2)")
        try:
            settings[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise InputError(f"{value!r} in workload {text!r} is no value") from None
    return name.strip(), settings


def _named(name: str) -> dict[str, Any]:
    known = known_workloads()
    path = known.get(name.lower()) or Path(name).expanduser()
    if not path.is_file():
        raise unknown_name("workload", name, known, "a YAML file or a trace works too")
    if path.suffix.lower() in _TRACES:
        timed = any(row.arrival_s is not None for row in read_trace(path))
        values = {"name": path.stem, "trace": path, "requests": len(read_trace(path))}
        return {**values, "arrivals": "trace" if timed else "poisson"}
    return {"name": path.stem, **read_yaml(path)}
