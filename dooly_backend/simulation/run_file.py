"""Runs as files: compact JSON, packed with xz or gzip where the name says so.

Steps of a busy engine differ little from one to the next: the same decodes,
each with one token more of context. A step is written as what differs from
that, so that hundreds of requests take some hundred kilobytes. Times are whole
nanoseconds, each as its distance from an earlier one.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dooly_backend.errors import InputError
from dooly_backend.simulation.records import (
    KvCacheGroup,
    RequestRecord,
    Run,
    ScheduledRequest,
    ServingLimits,
    ServingRequest,
    StepRecord,
    StepTime,
)

FORMAT = "dooly-run"
VERSION = 1

_REQUEST = ("id", "prompt_tokens", "output_tokens", "prefix", "prefix_tokens", "priority")
_TIME = ("device_us", "host_us", "output_us", "launch_us")
_MOST_BYTES = 1 << 30  # unpacked: a file of a stranger may unpack to anything


def save_run(run: Run, path: Path) -> None:
    """Write `run` to `path`: ``.json``, ``.json.gz`` or ``.json.xz``. Raises InputError."""
    data = json.dumps(to_json(run), separators=(",", ":")).encode()
    if path.suffix == ".xz":
        data = lzma.compress(data, preset=6)
    elif path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def load_run(path: Path) -> Run:
    """Inverse of `save_run`, to a nanosecond. Raises InputError for a file that is no run."""
    try:
        data = _unpack(path.read_bytes())
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
    if len(data) > _MOST_BYTES:
        raise InputError(f"{path} unpacks to more than {_MOST_BYTES >> 20} MiB: no run is so long")
    try:
        values = json.loads(data)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise InputError(f"{path} is no run: write one with `save_run`")
        if values.get("version") != VERSION:
            raise InputError(
                f"{path} is a run of version {values.get('version')!r}, this is Dooly for version "
                f"{VERSION}: record it again"
            )
        return from_json(values)
    except InputError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise InputError(f"{path} is no whole run ({error!r}): record it again") from None


def _unpack(data: bytes) -> bytes:
    """At most a byte more than a run may have."""
    if data[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=io.BytesIO(data)).read(_MOST_BYTES + 1)
    if data[:6] == b"\xfd7zXZ\x00":
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        whole = unpacker.decompress(data, _MOST_BYTES + 1)
        if not unpacker.eof and len(whole) <= _MOST_BYTES:
            raise EOFError("it ends too early")
        return whole
    return data


# -- to and from JSON ----------------------------------------------------------------------


def to_json(run: Run) -> dict[str, Any]:
    """`run` as plain values. Raises InputError for tokens that came at no step's end."""
    try:
        return _to_json(run)
    except KeyError as error:
        raise InputError(
            f"a request was scheduled or got a token at {error} s, which is no step's start or end"
        ) from None


def _to_json(run: Run) -> dict[str, Any]:
    ends = {step.end_s: index for index, step in enumerate(run.steps)}
    starts = {step.start_s: index for index, step in enumerate(run.steps)}
    values: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "about": dict(run.about),
        "limits": None if run.limits is None else asdict(run.limits),
        "requests": {
            **{name: [getattr(r.request, name) for r in run.requests] for name in _REQUEST},
            "arrival_ns": [_ns(r.request.arrival_s) for r in run.requests],
            "first_step": [starts[r.scheduled_s] for r in run.requests],
            "token_steps": [_runs([ends[s] for s in r.token_s]) for r in run.requests],
            "cached_tokens": [r.cached_tokens for r in run.requests],
            "preemptions": [r.preemptions for r in run.requests],
            "admitted": [r.admitted for r in run.requests],
        },
        "steps": {
            "start_ns": _deltas([_ns(step.start_s) for step in run.steps]),
            "launched_ns": [_after(step, step.launched_s) for step in run.steps],
            "ready_ns": [_after(step, step.ready_s) for step in run.steps],
            "end_ns": [_after(step, step.end_s) for step in run.steps],
            "scheduled": _packed(run.steps),
            "preempted": {
                str(index): list(step.preempted)
                for index, step in enumerate(run.steps)
                if step.preempted
            },
        },
    }
    times = [step.time for step in run.steps if step.time is not None]
    if times and len(times) == len(run.steps):
        values["steps"]["time"] = {
            **{name: [getattr(time, name) for time in times] for name in _TIME},
            "extrapolated": [int(time.extrapolated) for time in times],
            "tokens": [time.tokens for time in times],
        }
        later = [list(time.later_us) for time in times]
        if any(later):
            values["steps"]["time"]["later_us"] = later
    return values


def from_json(values: dict[str, Any]) -> Run:
    """Inverse of `to_json`."""
    columns = values["steps"]
    scheduled = _unpacked(columns["scheduled"])
    starts = _summed(columns["start_ns"])
    preempted = {int(index): tuple(ids) for index, ids in columns["preempted"].items()}
    times = columns.get("time")
    steps = tuple(
        StepRecord(
            start / 1e9,
            (start + end) / 1e9,
            entries,
            preempted.get(index, ()),
            None if launched is None else (start + launched) / 1e9,
            None if ready is None else (start + ready) / 1e9,
            times and _time(times, index),
        )
        for index, (start, end, launched, ready, entries) in enumerate(
            zip(
                starts,
                columns["end_ns"],
                columns["launched_ns"],
                columns["ready_ns"],
                scheduled,
                strict=True,
            )
        )
    )
    rows = values["requests"]
    requests = tuple(
        RequestRecord(
            ServingRequest(
                arrival_s=rows["arrival_ns"][i] / 1e9, **{name: rows[name][i] for name in _REQUEST}
            ),
            steps[rows["first_step"][i]].start_s,
            tuple(steps[step].end_s for step in _unrun(rows["token_steps"][i])),
            rows["cached_tokens"][i],
            rows["preemptions"][i],
            rows["admitted"][i],
        )
        for i in range(len(rows["id"]))
    )
    limits = values["limits"]
    return Run(steps, requests, None if limits is None else _limits(limits), values["about"])


def _limits(values: dict[str, Any]) -> ServingLimits:
    groups = tuple(KvCacheGroup(**group) for group in values.get("kv_groups", ()))
    return ServingLimits(**{**values, "kv_groups": groups})


def _time(columns: dict[str, Any], index: int) -> StepTime:
    parts = {name: columns[name][index] for name in _TIME if name in columns}
    tokens = columns["tokens"][index] if "tokens" in columns else 0
    later = tuple(columns["later_us"][index]) if "later_us" in columns else ()
    outside = bool(columns["extrapolated"][index])
    return StepTime(**parts, extrapolated=outside, tokens=tokens, later_us=later)


# -- schedules -----------------------------------------------------------------------------


def _packed(steps: Sequence[StepRecord]) -> list[Any]:
    """Every step as what differs from the one before.

    0 where all of its requests decode one more token; else [gone, entries]: the ids
    that are not in this step, and [id, query, context] of those that are new or do
    anything but decode one more token; where that would not give the order, [entries].
    """
    packed: list[Any] = []
    before: tuple[ScheduledRequest, ...] = ()
    for step in steps:
        expected = {r.id: ScheduledRequest(r.id, 1, r.context + r.query) for r in before}
        now = {r.id for r in step.scheduled}
        gone = [identity for identity in expected if identity not in now]
        entries = [[r.id, r.query, r.context] for r in step.scheduled if expected.get(r.id) != r]
        code: Any = [gone, entries] if gone or entries else 0
        if _next(before, code) != step.scheduled:
            code = [[[r.id, r.query, r.context] for r in step.scheduled]]
        packed.append(code)
        before = step.scheduled
    return packed


def _unpacked(codes: Sequence[Any]) -> list[tuple[ScheduledRequest, ...]]:
    """Inverse of `_packed`."""
    steps: list[tuple[ScheduledRequest, ...]] = []
    before: tuple[ScheduledRequest, ...] = ()
    for code in codes:
        before = _next(before, code)
        steps.append(before)
    return steps


def _next(before: tuple[ScheduledRequest, ...], code: Any) -> tuple[ScheduledRequest, ...]:
    if code and len(code) == 1:
        return tuple(ScheduledRequest(*entry) for entry in code[0])
    gone, entries = code or ((), ())
    steps = {r.id: ScheduledRequest(r.id, 1, r.context + r.query) for r in before}
    for identity in gone:
        del steps[identity]
    for entry in entries:
        steps[entry[0]] = ScheduledRequest(*entry)
    return tuple(steps.values())


# -- numbers -------------------------------------------------------------------------------


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _after(step: StepRecord, seconds: float | None) -> int | None:
    return None if seconds is None else _ns(seconds) - _ns(step.start_s)


def _deltas(values: Sequence[int]) -> list[int]:
    return [value - before for value, before in zip(values, [0, *values], strict=False)]


def _summed(deltas: Sequence[int]) -> list[int]:
    values, value = [], 0
    for delta in deltas:
        value += delta
        values.append(value)
    return values


def _runs(values: Sequence[int]) -> list[int]:
    """Increasing numbers as the first one and the distances: [delta, how often, ...]."""
    runs: list[int] = []
    for delta in _deltas(values):
        if runs and runs[-2] == delta:
            runs[-1] += 1
        else:
            runs += [delta, 1]
    return runs


def _unrun(runs: Sequence[int]) -> list[int]:
    """Inverse of `_runs`."""
    deltas = [
        delta for delta, times in zip(runs[::2], runs[1::2], strict=True) for _ in range(times)
    ]
    return _summed(deltas)
