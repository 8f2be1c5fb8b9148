"""Vidur's own grid as a sweep: the numbers of points that its profiler measures."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dooly_backend.config import VidurSweep, load_sweep
from dooly_backend.database.records import Signature
from dooly_backend.profiling.sweep import sweep_points
from dooly_backend.workload import Batch


def test_the_default_grid() -> None:
    """Twice-listed values (1024, 2048, ...) once: Vidur measures 261 and 10,972 in all."""
    sweep = load_sweep("vidur")
    assert isinstance(sweep, VidurSweep)
    assert len(sweep.token_points()) == 259
    batches = [point.batch for point in sweep.batch_points(10**6) if point.batch]
    assert len({batch.key for batch in batches}) == len(batches) == 10_648
    assert sum(1 for batch in batches if batch.decodes) == 79 * 128


def test_chunks_divide_a_prompt() -> None:
    sweep = VidurSweep(name="x", rule="vidur", tokens=256, length=256, batch=2)
    batches = {point.batch for point in sweep.batch_points(10**6)}
    assert {Batch.prefill(64, history) for history in (0, 64, 128, 192)} < batches
    assert Batch.prefill(96, 96) in batches  # 2 of 96 fit
    assert Batch.prefill(96, 192) not in batches
    assert Batch.prefill(224) in batches  # whole prompts in steps of 32
    assert Batch.decode(2, 224) in batches
    assert Batch.decode(2, 256) not in batches  # no room for the new token


def test_within_the_engines_limits() -> None:
    engine: Any = SimpleNamespace(max_num_tokens=512, max_num_reqs=8, max_request_len=255)
    for kind in ("tokens", "requests", "batch"):
        points = sweep_points(Signature("x", "module", kind, "{}"), load_sweep("vidur"), engine)  # type: ignore[arg-type]
        assert points
        for _, batch in points:
            assert batch.num_reqs <= 8
            assert batch.num_tokens <= 512
            assert batch.longest <= 255


def vidurs_rules() -> ModuleType:
    """The module of a checkout of microsoft/vidur that states the grid."""
    if "VIDUR_REPO" not in os.environ:
        pytest.skip("needs a checkout of microsoft/vidur: set VIDUR_REPO")
    path = Path(os.environ["VIDUR_REPO"]) / "vidur" / "profiling" / "utils" / "__init__.py"
    source = path.read_text()
    # Its imports need packages that have nothing to do with the grid.
    start = source.index("def get_num_tokens_to_profile")
    stop = source.index("def get_attention_input_combinations")
    module = ModuleType("rules")
    exec(compile(source[start:stop], str(path), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(("length", "batch"), [(1024, 32), (4096, 128), (16384, 512)])
def test_against_vidurs_own_code(length: int, batch: int) -> None:
    rules = vidurs_rules()
    sweep = VidurSweep(name="x", rule="vidur", tokens=length, length=length, batch=batch)
    counts = {point.num_tokens for point in sweep.token_points()}
    assert counts == set(rules.get_num_tokens_to_profile(length))
    lengths = set(rules.get_seq_lengths_to_profile(length)) - {0}
    batches = {point.batch for point in sweep.batch_points(10**6) if point.batch}
    sizes = rules.get_attention_batch_sizes_to_profile(1, batch)
    assert {b for b in batches if b.decodes} == {Batch.decode(n, c) for n in sizes for c in lengths}
    chunks = set(rules.get_attention_prefill_chunk_sizes_to_profile(length))
    assert {b.requests[0].query for b in batches if b.prefills} == chunks | lengths
