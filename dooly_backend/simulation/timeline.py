"""A run as a trace that Perfetto and chrome://tracing open.

The format is the Trace Event Format: JSON with a list `traceEvents`, times in
microseconds. Steps are complete events ("X") of one thread, requests are
asynchronous events ("b", "e") with a phase each for queueing, prefill and
decoding, and counters ("C") show how many requests run and wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from dooly_backend.simulation.records import RequestRecord, Run, StepRecord
from dooly_backend.workload import Batch, Request

Event = dict[str, Any]

ENGINE, REQUESTS = 1, 2  # processes of the trace
LONGEST_TEXT = 200  # characters of a batch that are shown


def trace_events(run: Run) -> dict[str, Any]:
    """The run as one object of the Trace Event Format, events in the order of time."""
    events = [*_names(), *_steps(run), *_counters(run)]
    for record in run.requests:
        events += _request(record)
    events.sort(key=lambda event: event.get("ts", -1.0))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names() -> Iterator[Event]:
    for process, name in ((ENGINE, "engine"), (REQUESTS, "requests")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}


def _steps(run: Run) -> Iterator[Event]:
    """Steps that overlap, as in a pipeline, each get a free track of their own."""
    free_at: list[float] = []
    for index, step in enumerate(run.steps):
        track = next((i for i, end in enumerate(free_at) if end <= step.start_s), len(free_at))
        free_at[track : track + 1] = [step.end_s]
        yield {
            "ph": "X",
            "pid": ENGINE,
            "tid": track,
            "ts": _us(step.start_s),
            "dur": _us(step.end_s - step.start_s),
            "cat": "step",
            "name": _kind(step),
            "args": {"step": index, **_arguments(step)},
        }


def _kind(step: StepRecord) -> str:
    decodes = {s.query == 1 and s.context > 0 for s in step.scheduled}
    return "mixed" if len(decodes) == 2 else "decode" if True in decodes else "prefill"


def _arguments(step: StepRecord) -> Event:
    arguments: Event = {
        "requests": len(step.scheduled),
        "tokens": sum(s.query for s in step.scheduled),
    }
    if step.scheduled:
        batch = Batch(tuple(Request(s.query, s.context) for s in step.scheduled)).key
        arguments["batch"] = batch[:LONGEST_TEXT] + ("..." if len(batch) > LONGEST_TEXT else "")
    if step.preempted:
        arguments["preempted"] = list(step.preempted)
    if step.time is not None:
        arguments["device_us"] = round(step.time.device_us, 1)
        arguments["host_us"] = round(step.time.host_us + step.time.output_us, 1)
        arguments["extrapolated"] = step.time.extrapolated
    return arguments


def _request(record: RequestRecord) -> Iterator[Event]:
    request = record.request
    name = f"request {request.id}"
    phases = (
        ("queueing", request.arrival_s, record.scheduled_s),
        ("prefill", record.scheduled_s, record.token_s[0]),
        ("decode", record.token_s[0], record.token_s[-1]),
    )
    common = {"pid": REQUESTS, "tid": 0, "cat": "request", "id": request.id}
    arguments = {
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": len(record.token_s),
        "cached_tokens": record.cached_tokens,
        "preemptions": record.preemptions,
    }
    yield {"ph": "b", "ts": _us(request.arrival_s), "name": name, "args": arguments, **common}
    for phase, start, end in phases:
        if end > start:
            yield {"ph": "b", "ts": _us(start), "name": phase, **common}
            yield {"ph": "e", "ts": _us(end), "name": phase, **common}
    yield {"ph": "e", "ts": _us(record.token_s[-1]), "name": name, **common}


def _counters(run: Run) -> Iterator[Event]:
    """Requests that wait and that run, whenever one of them changes."""
    changes: list[tuple[float, int, int]] = []
    for record in run.requests:
        changes.append((record.request.arrival_s, 1, 0))
        changes.append((record.scheduled_s, -1, 1))
        changes.append((record.token_s[-1], 0, -1))
    waiting = running = 0
    for moment, together in groupby(sorted(changes), key=lambda change: change[0]):
        for _, waits, runs in together:
            waiting, running = waiting + waits, running + runs
        yield {
            "ph": "C",
            "pid": ENGINE,
            "ts": _us(moment),
            "name": "requests",
            "args": {"running": running, "waiting": waiting},
        }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
