"""What one engine step computes: requests, batches, and workload points.

A *batch* is the work of one step. Each request in it computes `query` new
tokens while `context` of its tokens already lie in the KV cache. A decode is
a request with one new token and a non-empty context; everything else is a
prefill (or a chunk of one).

A *workload point* is what of a batch a measurement depends on: for an
operation over tokens their number, for one over requests theirs, for
attention the whole batch. Its `key` is its identity in the database.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal

from dooly_backend.errors import InputError

PointKind = Literal["constant", "tokens", "requests", "batch", "routing"]

_ROUTING = re.compile(r"(\d+)(?:x(\d+))?")
_REQUEST = re.compile(r"(?:(\d+)x)?(\d+)\+(\d+)")


@dataclass(frozen=True, order=True)
class Request:
    """One request's share of a step: `query` new tokens after `context` cached ones."""

    query: int
    context: int

    def __post_init__(self) -> None:
        if self.query < 1 or self.context < 0:
            raise InputError(
                f"a request needs at least one new token and no negative context, not {self}"
            )

    @property
    def is_decode(self) -> bool:
        return self.query == 1 and self.context > 0


@dataclass(frozen=True)
class Batch:
    """The requests of one step, in an order that does not matter."""

    requests: tuple[Request, ...]

    def __post_init__(self) -> None:
        if not self.requests:
            raise InputError("a batch needs at least one request")
        if not self._are_equal:
            ordered = tuple(sorted(self.requests, reverse=True))
            object.__setattr__(self, "requests", ordered)

    @classmethod
    def prefill(cls, tokens: int, history: int = 0, count: int = 1) -> Batch:
        """`count` equal prefills of `tokens` new tokens after `history` cached ones."""
        return cls((Request(tokens, history),) * count)

    @classmethod
    def decode(cls, count: int, context: int) -> Batch:
        """`count` decodes at `context` cached tokens each."""
        return cls((Request(1, context),) * count)

    @classmethod
    def parse(cls, text: str) -> Batch:
        """Inverse of `key`: ``"2x128+0,8x1+1024"``. Raises InputError."""
        requests: list[Request] = []
        for part in text.split(","):
            match = _REQUEST.fullmatch(part.strip())
            if match is None:
                raise InputError(
                    f"{text!r} is no batch: write COUNTxQUERY+CONTEXT, ... (2x128+0,8x1+1024)"
                )
            count, query, context = match.groups()
            requests += [Request(int(query), int(context))] * int(count or 1)
        return cls(tuple(requests))

    def __add__(self, other: Batch) -> Batch:
        return Batch(self.requests + other.requests)

    @cached_property
    def _are_equal(self) -> bool:
        """Whether all requests are; many batches are such, so what follows is worth a shortcut."""
        return self.requests.count(self.requests[0]) == len(self.requests)

    @cached_property
    def key(self) -> str:
        """Run-length text of the requests: ``"2x128+0,8x1+1024"``."""
        if self._are_equal:
            first = self.requests[0]
            return f"{len(self.requests)}x{first.query}+{first.context}"
        return ",".join(
            f"{len(list(run))}x{request.query}+{request.context}"
            for request, run in groupby(self.requests)
        )

    @cached_property
    def num_tokens(self) -> int:
        return sum(request.query for request in self.requests)

    @property
    def num_reqs(self) -> int:
        return len(self.requests)

    @cached_property
    def prefills(self) -> tuple[Request, ...]:
        if self._are_equal:
            return () if self.requests[0].is_decode else self.requests
        return tuple(r for r in self.requests if not r.is_decode)

    @cached_property
    def decodes(self) -> tuple[Request, ...]:
        if self._are_equal:
            return self.requests if self.requests[0].is_decode else ()
        return tuple(r for r in self.requests if r.is_decode)

    @property
    def longest(self) -> int:
        """Tokens of the longest request once the step is done."""
        return max(r.query + r.context for r in self.requests)


@dataclass(frozen=True)
class WorkloadPoint:
    """Where in the space of requests a measurement was taken.

    kind "tokens" depends on `num_tokens` alone, "requests" on `num_reqs`
    alone, "batch" on every request's lengths, "routing" on `num_tokens` and on
    `num_experts`, the distinct experts that they activate, "constant" on
    nothing. A batch alone does not tell the experts: they are None then.
    """

    kind: PointKind
    num_tokens: int | None = None
    num_reqs: int | None = None
    batch: Batch | None = None
    num_experts: int | None = None

    @classmethod
    def of(cls, kind: PointKind, batch: Batch) -> WorkloadPoint:
        """The part of `batch` that an operation of this kind depends on."""
        if kind == "tokens":
            return cls(kind, num_tokens=batch.num_tokens)
        if kind == "requests":
            return cls(kind, num_reqs=batch.num_reqs)
        if kind == "routing":
            return cls(kind, num_tokens=batch.num_tokens)
        if kind == "batch":
            return cls(kind, batch.num_tokens, batch.num_reqs, batch)
        return cls("constant")

    @classmethod
    def parse(cls, key: str) -> WorkloadPoint:
        """Inverse of `key`. Raises InputError."""
        kind, _, value = key.partition("=")
        if kind == "constant" and not value:
            return cls("constant")
        if kind == "batch":
            return cls.of("batch", Batch.parse(value))
        if kind == "tokens" and value.isdecimal():
            return cls("tokens", num_tokens=int(value))
        if kind == "requests" and value.isdecimal():
            return cls("requests", num_reqs=int(value))
        if kind == "routing" and (match := _ROUTING.fullmatch(value)):
            experts = match.group(2)
            return cls(
                "routing",
                num_tokens=int(match.group(1)),
                num_experts=int(experts) if experts else None,
            )
        raise InputError(f"{key!r} is no workload point (tokens=128, requests=8, batch=1x128+0)")

    @property
    def key(self) -> str:
        if self.kind == "tokens":
            return f"tokens={self.num_tokens}"
        if self.kind == "routing":
            experts = "" if self.num_experts is None else f"x{self.num_experts}"
            return f"routing={self.num_tokens}{experts}"
        if self.kind == "requests":
            return f"requests={self.num_reqs}"
        if self.kind == "batch":
            assert self.batch is not None
            return f"batch={self.batch.key}"
        return "constant"
