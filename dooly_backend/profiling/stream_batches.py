"""The batches whose steps are timed whole, to tell what a step costs beyond its operations.

They span the ways in which an engine runs steps with CUDA graphs of up to 512
tokens. None of them is among those that tell how well the cost predicts
(`integration/gpu/steps.py`).
"""

from __future__ import annotations

from dooly_backend.workload import Batch, Request


def _uneven(*contexts: int) -> Batch:
    return Batch(tuple(Request(1, context) for context in contexts))


STREAM_BATCHES: tuple[Batch, ...] = (
    # One graph: decodes only.
    Batch.decode(1, 400),
    Batch.decode(2, 3000),
    Batch.decode(8, 1000),
    Batch.decode(12, 4000),
    Batch.decode(24, 700),
    Batch.decode(48, 1200),
    Batch.decode(80, 300),
    Batch.decode(112, 900),
    Batch.decode(160, 500),
    Batch.decode(224, 250),
    _uneven(300, 900, 2500, 5000),
    _uneven(*(100 + 260 * n for n in range(16))),
    _uneven(*(64 + 7 * (n % 8) ** 3 for n in range(60))),
    # Graphs in pieces: up to 512 tokens.
    Batch.prefill(24),
    Batch.prefill(96),
    Batch.prefill(200),
    Batch.prefill(320),
    Batch.prefill(480),
    Batch.prefill(100, count=3),
    Batch.prefill(40) + Batch.decode(6, 2000),
    Batch.prefill(150) + Batch.decode(20, 800),
    Batch.prefill(300) + Batch.decode(60, 700),
    # No graph.
    Batch.prefill(700),
    Batch.prefill(1500),
    Batch.prefill(3000),
    Batch.prefill(6000),
    Batch.prefill(900, 3000),
    Batch.prefill(400, count=5),
    Batch.prefill(800) + Batch.decode(40, 1000),
    Batch.prefill(1800) + Batch.decode(100, 500),
    Batch.prefill(1200, count=2) + Batch.decode(12, 1500),
)
