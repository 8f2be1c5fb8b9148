"""Steps in a row, each launched before the tokens of the one before it are waited for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch")

from engine_helpers import ATTENTION
from engine_helpers import state as state_of

from dooly_backend.engines.base import hooks
from dooly_backend.engines.vllm import VllmEngine
from dooly_backend.errors import EngineError
from dooly_backend.profiling.clock import measure_clock
from dooly_backend.workload import Batch


@pytest.fixture(autouse=True)
def leaves_no_request(engine: VllmEngine) -> Iterator[None]:
    before = state_of(engine)
    yield
    assert state_of(engine) == before


@pytest.fixture
def seen(engine: VllmEngine) -> Iterator[list[list[tuple[int, int]]]]:
    """(query, context) of every request of each step, the longest query first."""
    found: list[list[tuple[int, int]]] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata[ATTENTION[0]]
        queries = [b - a for a, b in pairwise(metadata.query_start_loc.tolist())]
        totals = metadata.seq_lens.tolist()
        found.append(
            sorted(((q, n - q) for q, n in zip(queries, totals, strict=False) if q), reverse=True)
        )

    handle = engine.modules[ATTENTION[0]].register_forward_pre_hook(look, with_kwargs=True)
    with hooks([handle]):
        yield found


def test_decodes_continue_beside_other_prefills(engine: VllmEngine, seen: list[Any]) -> None:
    short, long = Batch.prefill(16), Batch.prefill(40, 8)
    steps = engine.pipelined_sequence(Batch.decode(2, 100), [None, short, long, None])
    assert len(steps) == 4
    assert all(step.interval_us > 0 and step.launch_us > 0 for step in steps)
    assert {(step.begin_us, step.device_us) for step in steps} == {(None, None)}  # a CPU
    fresh = [[], [], [], [(16, 0)], [(40, 8)], []]  # two more steps run ahead
    assert seen[0] == [(1, 100)] * 2  # the decodes are brought in
    assert seen[1:] == [[*new, *[(1, 101 + i)] * 2] for i, new in enumerate(fresh)]


def test_equal_steps(engine: VllmEngine, seen: list[Any]) -> None:
    assert len(engine.pipelined_steps(Batch.parse("1x32+8,1x1+50"), 3)) == 3
    assert seen[1:] == [[(32, 8), (1, 51 + i)] for i in range(5)]


def test_prefills_alone(engine: VllmEngine, seen: list[Any]) -> None:
    assert len(engine.pipelined_sequence(None, [Batch.prefill(16), Batch.prefill(24)])) == 2
    assert seen == [[(16, 0)], [(16, 0)], [(16, 0)], [(24, 0)]]


def test_what_does_not_fit_is_refused_before_anything_runs(
    engine: VllmEngine, seen: list[Any]
) -> None:
    with pytest.raises(EngineError, match=r"^a step of nothing: give it decodes or prefills$"):
        engine.pipelined_sequence(None, [Batch.prefill(16), None])
    too_long = Batch.decode(1, engine.max_request_len - 4)
    with pytest.raises(EngineError, match=r"^[^\n]*tokens a request, the engine takes 2047$"):
        engine.pipelined_sequence(too_long, [None] * 3)
    with pytest.raises(EngineError, match=r"^[^\n]*tokens a step, the engine takes 2048$"):
        engine.pipelined_sequence(None, [Batch.prefill(16), Batch.prefill(1500, count=2)])
    assert seen == []


def test_a_cpu_has_no_clock_to_watch(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match=r"^this device tells no times of its own[^\n]+$"):
        measure_clock(engine)
