"""Many batches as arrays, so that a feature of all of them is one vector operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dooly_backend.errors import InputError
from dooly_backend.workload import Batch

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class BatchArray:
    """The requests of many batches, one after the other.

    `query` and `context` hold a number for every request; batch `i` is those
    from ``starts[i]`` to where the next one starts. No batch is empty.
    """

    def __init__(self, query: ArrayLike, context: ArrayLike, starts: ArrayLike = (0,)) -> None:
        """Raises InputError for lengths that are no requests, or an empty batch."""
        self.query: Integers = np.asarray(query, dtype=np.int64)
        self.context: Integers = np.asarray(context, dtype=np.int64)
        self.starts: Integers = np.asarray(starts, dtype=np.int64)
        ends = np.append(self.starts[1:], len(self.query))
        if self.query.shape != self.context.shape or self.query.ndim != 1:
            raise InputError("queries and contexts must be two lists of the same length")
        if len(self.starts) and (self.starts[0] != 0 or not (ends > self.starts).all()):
            raise InputError("every batch needs at least one request: starts must rise from 0")
        if len(self.query) and (self.query.min() < 1 or self.context.min() < 0):
            raise InputError("a request needs at least one new token and no negative context")

    @classmethod
    def of(cls, batches: Iterable[Batch]) -> BatchArray:
        """The same batches, in their order."""
        query: list[int] = []
        context: list[int] = []
        starts: list[int] = []
        for batch in batches:
            starts.append(len(query))
            for request in batch.requests:
                query.append(request.query)
                context.append(request.context)
        return cls(query, context, starts)

    def __len__(self) -> int:
        return len(self.starts)

    # -- of each request

    @cached_property
    def is_decode(self) -> NDArray[np.bool_]:
        """Of each request: one new token after others."""
        return (self.query == 1) & (self.context > 0)

    # -- of each batch

    def sum(self, values: NDArray) -> Floats:
        """Of each batch, the sum of a value of its requests."""
        return np.add.reduceat(np.asarray(values, dtype=np.float64), self.starts)

    def max(self, values: NDArray) -> Floats:
        """Of each batch, the largest value of its requests."""
        return np.maximum.reduceat(np.asarray(values, dtype=np.float64), self.starts)

    @cached_property
    def num_tokens(self) -> Floats:
        return self.sum(self.query)

    @cached_property
    def num_reqs(self) -> Floats:
        return np.diff(self.starts, append=len(self.query)).astype(np.float64)

    @cached_property
    def decodes(self) -> Floats:
        """Of each batch, how many of its requests decode."""
        return self.sum(self.is_decode)


def keys_seen(window: float, query: Integers, context: Integers) -> Floats:
    """Pairs of a new token and a key that it attends to, of each request.

    A token at place ``p`` sees itself and those before it, but no more than
    `window` of them: ``sum(min(context + i, window) for i in 1..query)``.
    """
    q, c = query.astype(np.float64), context.astype(np.float64)
    growing = np.clip(window - c, 0.0, q)  # tokens that still see everything
    return growing * c + growing * (growing + 1) / 2 + (q - growing) * np.minimum(window, c + q)


class Columns(Protocol):
    """What has the arrays of a `BatchArray`; the simulation has records of its own."""

    @property
    def query(self) -> Any: ...

    @property
    def context(self) -> Any: ...

    @property
    def starts(self) -> Any: ...


def as_array(batches: BatchArray | Columns | Sequence[Batch]) -> BatchArray:
    """The batches as arrays, whatever form they come in. Raises InputError."""
    if isinstance(batches, BatchArray):
        return batches
    if isinstance(batches, Sequence):
        return BatchArray.of(batches)
    return BatchArray(batches.query, batches.context, batches.starts)
