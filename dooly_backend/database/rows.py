"""Between the columns of the latency database and the records: the one place for it."""

from __future__ import annotations

import json
import math
import sqlite3
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from typing import Any

from dooly_backend.database.records import (
    ClockStep,
    Configuration,
    Environment,
    HostStep,
    KvCapacity,
    KvGroup,
    Measurement,
    Occurrence,
    PartCost,
    RunConditions,
    Signature,
    SkippedPoint,
    StepCost,
    StepMeasurement,
    StreamStep,
)
from dooly_backend.errors import InputError
from dooly_backend.workload import Batch, WorkloadPoint

Row = sqlite3.Row
Columns = dict[str, Any]

#: Columns of what is no time, whose names say so.
_PART_COLUMNS = {"share": "share_ratio", "mape": "mape_percent", "worst": "worst_percent"}

_CONFIGURATION_PLAIN = (
    "model",
    "engine",
    "backend",
    "dtype",
    "kv_cache_dtype",
    "block_size",
    "tensor_parallel",
    "pipeline_parallel",
    "execution_mode",
    "num_layers",
)


def now() -> str:
    """The time, UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def insertion(table: str, columns: Columns, conflict: str = "") -> str:
    """An INSERT with named parameters; `conflict` is what follows ON CONFLICT."""
    names = ", ".join(columns)
    values = ", ".join(f":{name}" for name in columns)
    statement = f"INSERT INTO {table} ({names}) VALUES ({values})"
    return f"{statement} ON CONFLICT {conflict}" if conflict else statement


def matching(key: Columns) -> str:
    """A condition with named parameters: every column of `key` has its value."""
    return " AND ".join(f"{name} = :{name}" for name in key)


def environment_columns(environment: Environment) -> Columns:
    return {
        "digest": environment.digest,
        "device": environment.device,
        "device_kind": environment.device_kind,
        "engine": environment.engine,
        "engine_version": environment.engine_version,
        "facts": json.dumps(environment.facts, ensure_ascii=False),
        "added_at": now(),
    }


def environment_of(row: Row) -> Environment:
    return Environment(
        device=row["device"],
        device_kind=row["device_kind"],
        engine=row["engine"],
        engine_version=row["engine_version"],
        facts=json.loads(row["facts"]),
    )


def configuration_columns(configuration: Configuration) -> Columns:
    plain = {name: getattr(configuration, name) for name in _CONFIGURATION_PLAIN}
    return {
        "digest": configuration.digest,
        **plain,
        "hf_config": json.dumps(configuration.hf_config, ensure_ascii=False),
        "facts": json.dumps(configuration.facts, ensure_ascii=False),
        "added_at": now(),
    }


def configuration_of(row: Row) -> Configuration:
    return Configuration(
        **{name: row[name] for name in _CONFIGURATION_PLAIN},
        hf_config=json.loads(row["hf_config"]),
        facts=json.loads(row["facts"]),
    )


def signature_columns(signature: Signature) -> Columns:
    return {
        "hash": signature.hash,
        "name": signature.name,
        "granularity": signature.granularity,
        "kind": signature.kind,
        "canonical": signature.canonical,
    }


def signature_of(row: Row) -> Signature:
    return Signature(row["name"], row["granularity"], row["kind"], row["canonical"])


def occurrence_columns(configuration_id: int, occurrence: Occurrence) -> Columns:
    return {
        "configuration_id": configuration_id,
        "position": occurrence.position,
        "path": occurrence.path,
        "module_class": occurrence.module_class,
        "signature": occurrence.signature.hash,
        "count": occurrence.count,
        "layers": json.dumps(occurrence.layers),
    }


def occurrence_of(row: Row) -> Occurrence:
    """From a row of `occurrence` joined with its `signature`."""
    return Occurrence(
        position=row["position"],
        path=row["path"],
        module_class=row["module_class"],
        signature=signature_of(row),
        count=row["count"],
        layers=tuple(json.loads(row["layers"])),
    )


def point_columns(point: WorkloadPoint) -> Columns:
    batch = point.batch
    return {
        "key": point.key,
        "kind": point.kind,
        "num_tokens": point.num_tokens,
        "num_reqs": point.num_reqs,
        "num_prefill_tokens": batch and sum(request.query for request in batch.prefills),
        "num_decodes": batch and len(batch.decodes),
        "batch": batch and batch.key,
        "num_experts": point.num_experts,
    }


def point_of(row: Row) -> WorkloadPoint:
    """From the column `key` of `workload_point`."""
    return WorkloadPoint.parse(row["key"])


def measurement_columns(measurement: Measurement) -> Columns:
    """Raises InputError when the samples are no times."""
    samples = _times(measurement.samples_us, measurement.point.key)
    plain = replace(measurement, samples_us=samples)
    return {
        "samples_us": json.dumps(samples),
        "n": len(samples),
        "min_us": plain.min_us,
        "p25_us": plain.p25_us,
        "median_us": plain.median_us,
        "mean_us": plain.mean_us,
        "max_us": plain.max_us,
        "std_us": plain.std_us,
        "unstable": int(plain.unstable),
        "measured_at": now(),
    }


def measurement_of(row: Row) -> Measurement:
    """From a row of `measurement` joined with the `key` of its `workload_point`."""
    samples = tuple(float(sample) for sample in json.loads(row["samples_us"]))
    return Measurement(point_of(row), samples, unstable=bool(row["unstable"]))


def skipped_of(row: Row) -> SkippedPoint:
    """From a row of `skipped_point` joined with the `key` of its `workload_point`."""
    return SkippedPoint(point_of(row), row["reason"])


def step_columns(step: StepMeasurement) -> Columns:
    """Raises InputError when the samples are no times."""
    samples = _times(step.live_us, f"step {step.batch.key}")
    return {
        "batch": step.batch.key,
        "num_layers": step.num_layers,
        "live_us": json.dumps(samples),
        "live_median_us": statistics.median(samples),
        "operations_us": float(step.operations_us),
        "measured_at": now(),
    }


def step_of(row: Row) -> StepMeasurement:
    return StepMeasurement(
        batch=Batch.parse(row["batch"]),
        num_layers=row["num_layers"],
        live_us=tuple(float(sample) for sample in json.loads(row["live_us"])),
        operations_us=row["operations_us"],
    )


def step_cost_columns(cost: StepCost) -> Columns:
    return {
        "step_us": cost.step_us,
        "layer_us": cost.layer_us,
        "request_us": cost.request_us,
        "fitted_at": now(),
    }


def step_cost_of(row: Row) -> StepCost:
    return StepCost(row["step_us"], row["layer_us"], row["request_us"])


def stream_step_columns(step: StreamStep) -> Columns:
    """Raises InputError when the samples are no times."""
    intervals = _times(step.interval_us, f"step {step.batch.key}")
    launches = _times(step.launch_us, f"step {step.batch.key}")
    device = _times(step.device_us, f"step {step.batch.key}") if step.device_us else ()
    alone = _times(step.alone_us, f"step {step.batch.key}") if step.alone_us else ()
    low, middle, high = _quartiles(intervals)
    return {
        "batch": step.batch.key,
        "num_layers": step.num_layers,
        "mode": step.mode,
        "padded_tokens": step.padded_tokens,
        "interval_us": json.dumps(intervals),
        "launch_us": json.dumps(launches),
        "device_us": json.dumps(device),
        "alone_us": json.dumps(alone),
        "interval_p25_us": low,
        "interval_median_us": middle,
        "interval_p75_us": high,
        "launch_median_us": statistics.median(launches),
        "measured_at": now(),
    }


def stream_step_of(row: Row) -> StreamStep:
    return StreamStep(
        batch=Batch.parse(row["batch"]),
        num_layers=row["num_layers"],
        mode=row["mode"],
        padded_tokens=row["padded_tokens"],
        interval_us=_floats(row["interval_us"]),
        launch_us=_floats(row["launch_us"]),
        device_us=_floats(row["device_us"]),
        alone_us=_floats(row["alone_us"]),
    )


def host_step_columns(step: HostStep) -> Columns:
    """Raises InputError when the samples are no times."""
    what = f"the host's step of {step.num_reqs} requests"
    schedule, output = _times(step.schedule_us, what), _times(step.output_us, what)
    return {
        "num_reqs": step.num_reqs,
        "schedule_us": json.dumps(schedule),
        "output_us": json.dumps(output),
        "schedule_median_us": statistics.median(schedule),
        "output_median_us": statistics.median(output),
        "measured_at": now(),
    }


def host_step_of(row: Row) -> HostStep:
    return HostStep(row["num_reqs"], _floats(row["schedule_us"]), _floats(row["output_us"]))


def clock_columns(steps: Sequence[ClockStep]) -> Columns:
    """One row of the table for the steps of one pattern, in order.

    Raises InputError when they are no times, or of several patterns.
    """
    first = steps[0]
    if any((s.num_layers, s.pattern) != (first.num_layers, first.pattern) for s in steps):
        raise InputError("steps of several patterns or depths: store each on its own")
    what = f"the clock, {first.pattern}"
    return {
        "num_layers": first.num_layers,
        "pattern": first.pattern,
        "tokens": json.dumps([step.tokens for step in steps]),
        "begin_us": json.dumps(_times(tuple(round(s.begin_us, 1) for s in steps), what)),
        "device_us": json.dumps(_times(tuple(round(s.device_us, 1) for s in steps), what)),
        "measured_at": now(),
    }


def clock_steps_of(row: Row) -> list[ClockStep]:
    columns = json.loads(row["tokens"]), _floats(row["begin_us"]), _floats(row["device_us"])
    return [
        ClockStep(row["num_layers"], row["pattern"], place, *values)
        for place, values in enumerate(zip(*columns, strict=True))
    ]


def part_cost_columns(cost: PartCost) -> Columns:
    columns = {_PART_COLUMNS.get(name, name): value for name, value in asdict(cost).items()}
    return columns | {"fitted_at": now()}


def part_cost_of(row: Row) -> PartCost:
    names = [field.name for field in fields(PartCost)]
    return PartCost(**{name: row[_PART_COLUMNS.get(name, name)] for name in names})


def run_columns(run: RunConditions) -> Columns:
    return {
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "facts": json.dumps(run.facts, ensure_ascii=False),
    }


def run_of(row: Row) -> RunConditions:
    return RunConditions(row["started_at"], row["ended_at"], json.loads(row["facts"]))


def kv_capacity_columns(capacity: KvCapacity) -> Columns:
    return asdict(capacity) | {
        "groups": json.dumps([asdict(group) for group in capacity.groups]),
        "recorded_at": now(),
    }


def kv_capacity_of(row: Row) -> KvCapacity:
    names = [field.name for field in fields(KvCapacity) if field.name != "groups"]
    groups = tuple(KvGroup(**group) for group in json.loads(row["groups"]))
    return KvCapacity(groups=groups, **{name: row[name] for name in names})


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(sample) for sample in json.loads(text))


def _quartiles(times: tuple[float, ...]) -> tuple[float, float, float]:
    if len(times) == 1:
        return (times[0],) * 3
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return low, statistics.median(times), high


def _times(samples: tuple[float, ...], what: str) -> tuple[float, ...]:
    """Samples as plain floats: JSON knows neither NaN nor numpy's numbers."""
    times = tuple(float(sample) for sample in samples)
    wrong = [time for time in times if not (math.isfinite(time) and time >= 0)]
    if wrong or not times:
        raise InputError(
            f"{what} needs samples in microseconds, finite and not negative, not {wrong}"
        )
    return times
