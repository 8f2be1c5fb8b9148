"""Sweeps: which points are measured. Grids of fixed ones, and ranges in which they are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field

from dooly_backend import vidur_grid
from dooly_backend.descriptions import (
    Axis,
    AxisFromZero,
    Description,
    PositiveInt,
    description_path,
    read_yaml,
    validated,
)
from dooly_backend.errors import InputError
from dooly_backend.spreads import SHAPES, Shape, uneven_decodes
from dooly_backend.workload import Batch, WorkloadPoint

_POWERS_OF_TWO = tuple(2**n for n in range(10))


class PrefillGrid(Description):
    """Prefill chunks of every length after every history."""

    chunk: Axis
    history: AxisFromZero = (0,)


class DecodeGrid(Description):
    """Decode batches of every size at every context."""

    batch: Axis
    context: Axis


class UnevenGrid(Description):
    """Decode batches of every size, mean context and shape (`spreads`)."""

    batch: Axis
    context: Axis
    shapes: Annotated[tuple[Shape, ...], Field(min_length=1)] = SHAPES

    def batches(self) -> Iterator[Batch]:
        for context in self.context:
            for shape in self.shapes:
                for count in self.batch:
                    yield uneven_decodes(count, context, shape)


class MixedGrid(Description):
    """One prefill beside decodes: every chunk after every history, beside every number.

    The decodes are of log-normal lengths, as in a step that is served.
    """

    chunk: Axis
    history: AxisFromZero = (0,)
    batch: Axis
    context: Axis

    def batches(self) -> Iterator[Batch]:
        for context in self.context:
            for count in self.batch:
                decodes = uneven_decodes(count, context, "lognormal")
                for history in self.history:
                    for chunk in self.chunk:
                        yield Batch.prefill(chunk, history) + decodes


class RoutingGrid(Description):
    """Mixture-of-experts layers at every number of tokens and of experts that fire."""

    tokens: Axis
    experts: Axis


def routing_points(
    tokens: Iterable[int], counts: Iterable[int], experts: int, top_k: int
) -> list[WorkloadPoint]:
    """Points of a MoE layer: at every number of `tokens` the possible ones of `counts` experts."""
    counts = tuple(counts)
    points = []
    for count in tokens:
        most = min(experts, count * top_k)
        wanted = {top_k, most, *(n for n in counts if top_k < n < most)}
        points += [
            WorkloadPoint("routing", num_tokens=count, num_experts=n) for n in sorted(wanted)
        ]
    return points


class Sweep(Description):
    """The workload points at which operations are timed."""

    name: str
    tokens: Axis
    requests: Axis
    prefill: PrefillGrid
    decode: DecodeGrid
    uneven: UnevenGrid | None = None
    mixed: MixedGrid | None = None
    routing: RoutingGrid | None = None  # None: the sweep's tokens, experts in powers of two

    def token_points(self) -> list[WorkloadPoint]:
        """Points of the operations that depend on the number of tokens."""
        return [WorkloadPoint("tokens", num_tokens=count) for count in self.tokens]

    def request_points(self) -> list[WorkloadPoint]:
        """Points of the operations that depend on the number of requests."""
        return [WorkloadPoint("requests", num_reqs=count) for count in self.requests]

    def routing_points(self, experts: int, top_k: int) -> list[WorkloadPoint]:
        """Points of a MoE layer of `experts` experts, `top_k` of them for a token.

        At every number of tokens from the fewest experts that can fire to the
        most, with the grid's numbers between them.
        """
        tokens = self.routing.tokens if self.routing else self.tokens
        counts = self.routing.experts if self.routing else _POWERS_OF_TWO
        return routing_points(tokens, counts, experts, top_k)

    def batch_points(self, max_model_len: int) -> list[WorkloadPoint]:
        """Points of attention: the batches that the model has room for."""
        prefills = (
            Batch.prefill(chunk, history)
            for history in self.prefill.history
            for chunk in self.prefill.chunk
        )
        decodes = (
            Batch.decode(count, context)
            for context in self.decode.context
            for count in self.decode.batch
        )
        others = [grid.batches() for grid in (self.uneven, self.mixed) if grid is not None]
        batches = chain(prefills, decodes, *others)
        fitting = [b for b in batches if b.longest <= max_model_len]
        # A chunk of one token after a history is a decode: keep one of the two.
        unique = {batch.key: batch for batch in fitting}
        return [WorkloadPoint.of("batch", batch) for batch in unique.values()]


class VidurSweep(Description):
    """The grid of Vidur's profiler, within limits of your own (`vidur_grid`).

    Vidur has no points for MoE layers: the experts are those of a `Sweep`.
    """

    name: str
    rule: Literal["vidur"]
    tokens: PositiveInt
    length: PositiveInt
    batch: PositiveInt

    def token_points(self) -> list[WorkloadPoint]:
        counts = vidur_grid.token_counts(self.tokens)
        return [WorkloadPoint("tokens", num_tokens=count) for count in counts]

    def request_points(self) -> list[WorkloadPoint]:
        counts = vidur_grid.sampled_batches(self.batch) or [self.batch]
        return [WorkloadPoint("requests", num_reqs=count) for count in counts]

    def routing_points(self, experts: int, top_k: int) -> list[WorkloadPoint]:
        counts = vidur_grid.token_counts(self.tokens)
        return routing_points(counts, _POWERS_OF_TWO, experts, top_k)

    def batch_points(self, max_model_len: int) -> list[WorkloadPoint]:
        longest = min(self.length, max_model_len)
        batches = vidur_grid.prefills(longest) + vidur_grid.decodes(longest, self.batch)
        return [WorkloadPoint.of("batch", batch) for batch in batches]


#: Sweeps whose points are known before anything is measured.
Grid = Sweep | VidurSweep


class AdaptiveSweep(Description):
    """Ranges in which points are chosen while measuring, and when to stop.

    The engine's own limits bound the ranges, too. `target` is the mean relative
    error on the last `held_out` points of a curve or surface, each predicted
    before it was measured; `points` bounds their number where it stays larger.
    """

    name: str
    target: Annotated[float, Field(gt=0, lt=1)]
    tokens: PositiveInt  # new tokens of a step, at most
    requests: PositiveInt  # requests of a step, at most
    context: PositiveInt  # tokens of a request in the KV cache, at most
    points: PositiveInt = 40
    held_out: PositiveInt = 4


def described(sweep: Grid | AdaptiveSweep) -> dict[str, Any]:
    """All that `sweep` asks for, as JSON: what `sweep_of` takes."""
    return sweep.model_dump(mode="json", exclude_none=True)


def load_sweep(name_or_path: str) -> Grid | AdaptiveSweep:
    """A sweep from ``configs/sweeps`` by name, or from a YAML file. Raises InputError.

    A description with a `target` is adaptive, one with a `rule` follows it, any
    other is a grid of its own.
    """
    path = description_path("sweep", name_or_path)
    return sweep_of(read_yaml(path), str(path))


def sweep_of(values: dict[str, Any], where: str) -> Grid | AdaptiveSweep:
    """The sweep that a description's `values` mean; `where` they are from. Raises InputError."""
    if "target" in values:
        return validated(AdaptiveSweep, values, where)
    if "rule" in values:
        return validated(VidurSweep, values, where)
    return validated(Sweep, values, where)


def load_grid(name_or_path: str) -> Grid:
    """As `load_sweep`, where only a grid will do. Raises InputError."""
    sweep = load_sweep(name_or_path)
    if isinstance(sweep, AdaptiveSweep):
        raise InputError(f"sweep {sweep.name!r} has no fixed points: choose a grid, like quick")
    return sweep
