"""What ran in a profiled step, and inside which ranges it was launched.

Reads the traces that torch's profiler exports (`export_chrome_trace`, torch
2.11 and 2.13). Work on the device ("kernel", "gpu_memcpy", "gpu_memset") has
the correlation id of the call that launched it ("cuda_runtime", "cuda_driver":
Triton's kernels, which no dispatcher sees, come by the latter); the launch lies
in the ranges that were open on its thread at that time. On a CPU the work is
the operations that call no other. Times are microseconds of the trace's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dooly_backend.errors import InputError
from dooly_backend.operations.tree import STRUCTURAL

Thread = tuple[Any, Any]  # process and thread, as the trace names them

#: Of an entry of the runnable set ("dooly#3") and of any module's call ("dooly@model.norm").
ENTRY, MODULE = "dooly#", "dooly@"

_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_RANGES = frozenset({"user_annotation", "cpu_op"})
#: Operations of the profiler, and of a mode that sees every operation, are no work of the step.
_OF_RECORDING = ("profiler::", "PythonDispatchMode", ENTRY, MODULE)
#: Leaves that launch nothing, beside the structural operations.
_IDLE = STRUCTURAL | {"aten::to", "aten::reshape", "aten::contiguous", "aten::set_"}


@dataclass(frozen=True)
class Range:
    """A named stretch of one thread."""

    name: str
    thread: Thread
    start: float
    end: float


@dataclass(frozen=True)
class Work:
    """One kernel, copy or fill of the device, or one operation of a CPU.

    `at` is when `thread` launched it, the middle of the launching call; both are
    None where the trace has no launch for it. `us` is how long it ran.
    """

    name: str
    kind: str
    us: float
    thread: Thread | None
    at: float | None


def events(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The complete events of a trace. Raises InputError where there are none."""
    found = [event for event in trace.get("traceEvents", ()) if event.get("ph") == "X"]
    if not found:
        raise InputError("the trace has no complete events: is it one of torch's profiler?")
    return found


def ranges(found: Iterable[Mapping[str, Any]]) -> list[Range]:
    """The ranges of entries and modules. Those that CUPTI repeats on the device are left out."""
    return [
        Range(str(event["name"]), _thread(event), *_span(event))
        for event in found
        if event.get("cat") in _RANGES and str(event["name"]).startswith((ENTRY, MODULE))
    ]


def device_work(found: Sequence[Mapping[str, Any]]) -> list[Work]:
    """What the device ran, in the order in which it was launched; what has no launch comes last."""
    launches: dict[Any, Mapping[str, Any]] = {}
    for event in found:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            # A call of the runtime may show the driver's call inside it, under the same id.
            known = launches.setdefault(event["args"]["correlation"], event)
            if float(event["ts"]) < float(known["ts"]):
                launches[event["args"]["correlation"]] = event
    work = []
    for event in found:
        if event.get("cat") in _DEVICE:
            launch = launches.get(event.get("args", {}).get("correlation"))
            thread, at = (None, None) if launch is None else (_thread(launch), _middle(launch))
            work.append(
                Work(str(event["name"]), str(event["cat"]), float(event["dur"]), thread, at)
            )
    return sorted(work, key=lambda w: (w.at is None, w.at))


def host_work(found: Iterable[Mapping[str, Any]]) -> list[Work]:
    """Operations that call no other and do more than make a view, in their order."""
    operations = [
        Range(str(event["name"]), _thread(event), *_span(event))
        for event in found
        if event.get("cat") == "cpu_op" and not str(event["name"]).startswith(_OF_RECORDING)
    ]
    operations.sort(key=_outer_first)
    work = []
    for i, op in enumerate(operations):
        after = operations[i + 1] if i + 1 < len(operations) else None
        calls = after is not None and after.thread == op.thread and after.start < op.end
        if not calls and op.name not in _IDLE:
            at = (op.start + op.end) / 2
            work.append(Work(op.name, "operation", op.end - op.start, op.thread, at))
    return sorted(work, key=lambda w: w.at or 0.0)


def enclosing(work: Iterable[Work], around: Iterable[Range]) -> Iterator[tuple[Work, list[Range]]]:
    """Each work with the ranges that were open on its thread at its launch, outermost first.

    Work without a launch has none.
    """
    by_thread: dict[Thread, list[Range]] = {}
    for one in sorted(around, key=_outer_first):
        by_thread.setdefault(one.thread, []).append(one)
    waiting = {thread: iter(of) for thread, of in by_thread.items()}
    ahead = {thread: next(of) for thread, of in waiting.items()}
    opened: dict[Thread, list[Range]] = {thread: [] for thread in by_thread}
    for one in sorted(work, key=lambda w: (w.at is None, w.at)):
        if one.thread is None or one.at is None or one.thread not in opened:
            yield one, []
            continue
        stack = opened[one.thread]
        while (following := ahead.get(one.thread)) and following.start <= one.at:
            stack.append(following)
            after = next(waiting[one.thread], None)
            if after is None:
                del ahead[one.thread]
            else:
                ahead[one.thread] = after
        stack[:] = [r for r in stack if r.end >= one.at]
        yield one, list(stack)


def _outer_first(one: Range) -> tuple[Any, float, float]:
    return str(one.thread), one.start, -one.end


def _thread(event: Mapping[str, Any]) -> Thread:
    return event.get("pid"), event.get("tid")


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0.0))


def _middle(event: Mapping[str, Any]) -> float:
    start, end = _span(event)
    return (start + end) / 2
