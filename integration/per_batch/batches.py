"""The single batches of appendix F.2, in series: one kind, one number of requests, many lengths.

A prefill-heavy batch is of new prompts, a decode-heavy one of requests that decode at
one cached length. Lengths grow by about the root of two, so that a winner's change is
found to that; none of the batches is in the sweep `gpu`, in the batches of a fit
(`profiling/stream_batches.py`) or in those that judge it (`integration/gpu/steps.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dooly_backend.workload import Batch

Kind = Literal["prefill", "decode", "mixed"]

#: An engine must take a batch as a whole: no prefill may be larger.
MOST_TOKENS = 16_384

#: Tokens of one request, by root two and by two.
_FINE = (144, 208, 288, 416, 576, 832, 1152, 1664, 2304, 3328, 4608, 6656, 9216, 12_800, 16_000)
_COARSE = (52, 104, 208, 416, 832, 1664, 3328)
_BEYOND = (20_000, 24_000)  # no sweep reaches as far
#: Tokens that a KV cache of 24 GiB holds, less what the steps of a row add.
_CACHED = 180_000


@dataclass(frozen=True, order=True)
class Series:
    """Batches that differ in the length of their requests alone."""

    kind: str
    requests: int

    def __str__(self) -> str:
        return f"{self.kind} x {self.requests}"


def place_of(batch: Batch) -> tuple[Series, int] | None:
    """The series of a batch and its length; None where its requests are not alike.

    The length is that of a prompt, or what a decode has cached. A chunk after a history
    belongs to no series.
    """
    first = batch.requests[0]
    if any(request != first for request in batch.requests):
        return None
    if first.is_decode:
        return Series("decode", batch.num_reqs), first.context
    return None if first.context else (Series("prefill", batch.num_reqs), first.query)


def kind_of(batch: Batch) -> Kind:
    if batch.decodes and batch.prefills:
        return "mixed"
    return "decode" if batch.decodes else "prefill"


BATCHES: tuple[Batch, ...] = (
    *(Batch.decode(1, length) for length in (*_FINE, *_BEYOND)),
    *(Batch.decode(6, length) for length in (*_FINE, *_BEYOND)),
    *(Batch.decode(20, length) for length in _FINE if 20 * length < _CACHED),
    *(Batch.decode(56, length) for length in _FINE if 56 * length < _CACHED),
    *(Batch.decode(112, length) for length in _FINE if 112 * length < _CACHED),
    *(Batch.prefill(length) for length in (36, 72, *_FINE)),
    *(Batch.prefill(length, count=4) for length in _COARSE),
    *(Batch.prefill(length, count=16) for length in _COARSE if 16 * length <= MOST_TOKENS),
    Batch.prefill(88) + Batch.decode(14, 1100),
    Batch.prefill(350) + Batch.decode(36, 1300),
    Batch.prefill(1100) + Batch.decode(28, 2600),
    Batch.prefill(2600) + Batch.decode(72, 900),
    Batch.prefill(640, count=3) + Batch.decode(10, 5200),
)
