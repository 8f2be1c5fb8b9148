"""Kernels of a live step under the entries of the runnable set: integration/gpu/coverage.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.errors import InputError
from dooly_backend.operations.runnable import resolve
from dooly_backend.tracing.trace import Trace
from dooly_backend.workload import Batch
from integration.gpu import coverage
from integration.gpu.covering import UNLINKED, Tally, cover_of, covered, difference, report
from integration.gpu.launches import Range, Work, device_work, enclosing, events, host_work, ranges

MAIN, OTHER = (70, 70), (70, 71)


def x(cat: str, name: str, ts: float, dur: float, place: Any = MAIN, **args: Any) -> dict[str, Any]:
    """A complete event as torch's profiler writes it."""
    pid, tid = place
    return {
        "ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur,
        "args": args,
    }  # fmt: skip


def device(name: str, ts: float, dur: float, correlation: int, cat: str = "kernel") -> Any:
    return x(cat, name, ts, dur, (0, 7), correlation=correlation, device=0, stream=7)


#: A step on a GPU: a copy to the device, a model of a linear layer and a Triton kernel, a sampler.
STEP = [
    {"ph": "M", "name": "process_name", "pid": 70, "tid": 0, "ts": 0, "args": {"name": "python"}},
    x("cuda_runtime", "cudaMemcpyAsync", 5, 2, correlation=1),
    device("Memcpy HtoD (Pinned -> Device)", 9, 2, 1, "gpu_memcpy"),
    x("user_annotation", "dooly@", 10, 100),
    x("user_annotation", "dooly@linear", 20, 20),
    x("user_annotation", "dooly#0", 22, 15),
    x("cpu_op", "aten::linear", 23, 12, **{"External id": 5}),
    x("cpu_op", "aten::mm", 24, 10, **{"External id": 6}),
    x("cuda_runtime", "cudaLaunchKernelExC", 26, 4, correlation=2, cbid=430),
    x("cuda_driver", "cuLaunchKernelEx", 27, 2, correlation=2, cbid=652),
    device("nvjet_tst_128x64", 60, 30, 2),
    x("user_annotation", "dooly@act", 45, 20),
    x("user_annotation", "dooly#1", 46, 15),
    x("cuda_driver", "cuLaunchKernelEx", 50, 3, correlation=3, cbid=652),
    device("triton_silu", 90, 8, 3),
    x("cuda_runtime", "cudaLaunchKernel", 51, 2, OTHER, correlation=4),
    device("another_thread", 92, 1, 4),
    x("gpu_user_annotation", "dooly#0", 60, 30, (0, 7)),
    {"ph": "s", "id": 2, "pid": 70, "tid": 70, "ts": 26, "cat": "ac2g", "name": "ac2g"},
    {"ph": "f", "id": 2, "pid": 0, "tid": 7, "ts": 60, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    x("user_annotation", "dooly@sampler", 130, 20),
    x("user_annotation", "dooly#2", 131, 18),
    x("cuda_runtime", "cudaLaunchKernel", 135, 4, correlation=5),
    device("argmax", 140, 3, 5),
    x("cuda_runtime", "cudaMemcpyAsync", 160, 4, correlation=6),
    device("Memcpy DtoH (Device -> Pinned)", 165, 2, 6, "gpu_memcpy"),
]


def trace_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {"schemaVersion": 1, "traceEvents": found}


def test_work_is_joined_to_its_launch_by_correlation() -> None:
    work = device_work(events(trace_of(STEP)))
    assert [(w.name, w.us, w.thread, w.at) for w in work] == [
        ("Memcpy HtoD (Pinned -> Device)", 2, MAIN, 6),
        ("nvjet_tst_128x64", 30, MAIN, 28),  # the runtime's call, not the driver's inside it
        ("triton_silu", 8, MAIN, 51.5),  # has no operation, and a launch of the driver alone
        ("another_thread", 1, OTHER, 52),
        ("argmax", 3, MAIN, 137),
        ("Memcpy DtoH (Device -> Pinned)", 2, MAIN, 162),
    ]


def test_a_step_whose_modules_are_covered_once() -> None:
    cover = cover_of(trace_of(STEP), 4, on_device=True)
    assert cover.is_exact
    assert Tally.of(cover.once) == Tally.of(cover.inside) == Tally(3, 41)
    assert {part: [w.name for w in of] for part, of in cover.outside.items()} == {
        "before the model": ["Memcpy HtoD (Pinned -> Device)"],
        "between model and sampler": ["another_thread"],
        "after the sampler": ["Memcpy DtoH (Device -> Pinned)"],
    }
    assert cover.idle == (3,)


def without(name: str) -> dict[str, Any]:
    return trace_of([event for event in STEP if event["name"] != name])


def test_gaps_doubles_and_lost_launches_are_named() -> None:
    told = report(cover_of(without("dooly#1"), 3, on_device=True))
    assert not told["exact"]
    assert told["gap_names"] == [{"where": "act", "name": "triton_silu", "count": 1, "us": 8.0}]
    assert told["gaps"] == {"count": 1, "us": 8.0}
    twice = trace_of([*STEP, x("user_annotation", "dooly#3", 23, 10)])
    told = report(cover_of(twice, 4, on_device=True))
    assert told["double_names"] == [
        {"where": "dooly#0, dooly#3", "name": "nvjet_tst_128x64", "count": 1, "us": 30.0}
    ]
    lost = cover_of(trace_of([*STEP, device("lost", 99, 1, 77)]), 3, on_device=True)
    assert [w.name for w in lost.outside[UNLINKED]] == ["lost"]
    assert not lost.is_exact


def test_a_trace_that_tells_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="no complete events"):
        cover_of({}, 1, on_device=True)
    ranged = {"dooly#0", "dooly#1", "dooly#2"}
    with pytest.raises(InputError, match="no range of an entry"):
        cover_of(trace_of([e for e in STEP if e["name"] not in ranged]), 1, on_device=True)


def test_containment_is_by_thread_and_time() -> None:
    outer, inner = Range("outer", MAIN, 0, 10), Range("inner", MAIN, 2, 4)
    elsewhere, late = Range("elsewhere", OTHER, 0, 10), Range("late", MAIN, 20, 30)

    def at(moment: float | None, thread: Any = MAIN) -> Work:
        return Work(f"{moment}", "kernel", 1.0, thread, moment)

    found = enclosing(
        [at(3), at(1), at(5), at(15), at(25), at(3, OTHER), at(3, (1, 1)), at(None, None)],
        [late, inner, elsewhere, outer],
    )
    assert [(w.name, [r.name for r in of]) for w, of in found] == [
        ("1", ["outer"]),
        ("3", ["outer", "inner"]),
        ("3", ["elsewhere"]),
        ("3", []),
        ("5", ["outer"]),
        ("15", []),
        ("25", ["late"]),
        ("None", []),
    ]


def test_host_operations_are_those_that_call_no_other() -> None:
    found = [
        x("cpu_op", "aten::linear", 0, 10),
        x("cpu_op", "PythonDispatchMode", 0.5, 9),
        x("cpu_op", "aten::t", 1, 1),
        x("cpu_op", "aten::mm", 3, 4),
        x("cpu_op", "profiler::_record_function_enter_new", 11, 1),
        x("cpu_op", "aten::add", 13, 1),
        x("cpu_op", "aten::mul", 13.2, 1, OTHER),
    ]
    assert [(w.name, w.us) for w in host_work(found)] == [
        ("aten::mm", 4),
        ("aten::add", 1),
        ("aten::mul", 1),
    ]
    cover = covered(host_work(found), ranges([x("user_annotation", "dooly@", 0, 12)]), 0)
    assert [w.name for w in cover.inside] == ["aten::mm"]


def test_difference_names_what_ranges_change() -> None:
    one, two = Work("one", "kernel", 1, None, None), Work("two", "kernel", 1, None, None)
    assert difference([one, one, two], [one, two]) == {"one": 1}
    assert difference([one], [one, two]) == {"two": -1}
    assert difference([two, one], [one, two]) == {}


def test_an_earlier_run_of_the_same_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "coverage.json"
    same = {"model": "m", "backend": "b", "mode": "eager", "device": "d"}
    coverage.merge(path, {**same, "batches": [1]})
    coverage.merge(path, {**same, "backend": "c", "batches": [2]})
    coverage.merge(path, {**same, "batches": [3]})
    assert [(r["backend"], r["batches"]) for r in json.loads(path.read_text())] == [
        ("c", [2]),
        ("b", [3]),
    ]


@pytest.mark.parametrize("key", ["1x40+0", "9x1+70", "1x20+30,4x1+60"])
def test_every_operation_of_a_live_step_lies_under_one_entry(
    engine: VllmEngine, trace: Trace, key: str, tmp_path: Path
) -> None:
    entries = resolve(trace, engine, prefer_operations=True).entries
    row = coverage.covered_step(engine, entries, Batch.parse(key), tmp_path)
    assert row["exact"]
    assert row["once"] == row["inside"]
    assert row["inside"]["count"] >= 85  # of three layers in float32: all that there are
    assert row["outside"]["before the model"]["count"] > 0
    assert row["ranges_change"] == {}
    assert len(list(tmp_path.iterdir())) == 1
    # The same step with one entry less: what it runs is a gap.
    one_less = coverage.covered_step(engine, entries[:-1], Batch.parse(key), None)
    assert not one_less["exact"]
    assert {gap["where"] for gap in one_less["gap_names"]} == {entries[-1].path}
