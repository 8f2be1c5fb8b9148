"""One rank of a parallel group on one device, whichever the engine.

Here is what all engines share: where a rank stands (`Rank`), and the operations
that stand for its communication. They move nothing: a collective returns at
once with the shape that it would have, so that a trace shows it and a
measurement of what is around it does not pay for it. `parallel_vllm` puts them
in the place of vLLM's communicators. See docs/parallel.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from dooly_backend.config import RunOptions

#: Groups of ranks that communicate; an operation's overload names its group.
GROUPS = ("tp", "pp", "ep", "dp", "pcp", "dcp", "world")

#: Operations that communicate, by name without overload.
COLLECTIVES = frozenset(
    f"dooly::{name}"
    for name in (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "gather",
        "broadcast",
        "send",
        "recv",
    )
)
#: What engines and torch register for communication, where it is called directly.
_NAMESPACES = ("c10d::", "_c10d_functional::", "symm_mem::")
_ENGINE_COLLECTIVES = frozenset(
    f"vllm::{name}" for name in ("all_reduce", "all_gather", "reduce_scatter")
)


def is_collective(name: str) -> bool:
    """Whether the operation of this name (with or without overload) communicates."""
    base = name.split(".")[0]
    return base in COLLECTIVES or base in _ENGINE_COLLECTIVES or base.startswith(_NAMESPACES)


@dataclass(frozen=True)
class Rank:
    """A rank of ``data x pipeline x tensor`` ranks, numbered in this order as vLLM does.

    Expert parallelism has no ranks of its own: the experts of a stage are
    divided among its tensor-parallel ranks, and those of its data-parallel
    replicas where `expert` is a multiple of `tensor`.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    rank: int = 0

    @classmethod
    def of(cls, options: RunOptions) -> Rank:
        return cls(
            options.tensor_parallel,
            options.pipeline_parallel,
            options.expert_parallel,
            options.rank,
        )

    @property
    def data(self) -> int:
        """Data-parallel replicas that share the experts."""
        return max(1, self.expert // self.tensor)

    @property
    def world(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def data_rank(self) -> int:
        return self.rank // (self.pipeline * self.tensor)

    @property
    def rank_in_replica(self) -> int:
        return self.rank % (self.pipeline * self.tensor)

    @property
    def stage(self) -> int:
        """Index of its pipeline stage."""
        return self.rank_in_replica // self.tensor

    @property
    def identity(self) -> dict[str, int]:
        """What distinguishes it beside the tensor- and pipeline-parallel degrees.

        Tensor-parallel ranks do the same work, so their number is left out.
        """
        found = {}
        if self.expert > 1:
            found["expert_parallel"] = self.expert
        if self.pipeline > 1:
            found["stage"] = self.stage
        return found


@cache
def define_operations() -> Any:
    """Define the ``dooly::`` operations; returns their namespace in `torch.ops`.

    Results have the right shape and, where later operations index by them,
    usable values. Nothing is copied that a step would not copy.
    """
    import torch

    library = torch.library.Library("dooly", "FRAGMENT")
    definitions = {
        "all_reduce": ("(Tensor x, int degree) -> Tensor", _same, _like),
        "broadcast": ("(Tensor x, int degree) -> Tensor", _same, _like),
        "recv": ("(Tensor x) -> Tensor", _same, _like),
        "send": ("(Tensor x) -> ()", _nothing, _nothing),
        "all_gather": ("(Tensor x, int dim, int degree) -> Tensor", _gathered, _gathered),
        "gather": ("(Tensor x, int dim, int degree) -> Tensor", _gathered, _gathered),
        "reduce_scatter": ("(Tensor x, int dim, int degree) -> Tensor", _chunk, _chunk),
    }
    for name, (schema, body, fake) in definitions.items():
        for group in GROUPS:
            overload = f"{name}.{group}"
            library.define(overload + schema)
            library.impl(overload, body, "CompositeExplicitAutograd")
            torch.library.register_fake(f"dooly::{overload}", fake, lib=library)
    _KEPT.append(library)
    return torch.ops.dooly


_KEPT: list[Any] = []  # a Library undoes its definitions when it is collected


def _same(x: Any, degree: int = 1) -> Any:
    return x


def _like(x: Any, degree: int = 1) -> Any:
    return x.new_empty(x.shape)


def _nothing(x: Any) -> None:
    return None


def _gathered(x: Any, dim: int, degree: int) -> Any:
    """Every rank's part, of which only this rank's is filled in, as the first.

    Parts of whole rows (dim 0: tokens dispatched to experts) get this rank's
    values, integers (expert ids, by which kernels index) as if every rank had
    the same. Columns (logits) stay zero: their values decide nothing later.
    """
    shape = list(x.shape)
    shape[dim] *= degree
    if not x.dtype.is_floating_point:
        return x.repeat([degree if d == dim % x.dim() else 1 for d in range(x.dim())])
    if dim % x.dim() == 0:
        whole = x.new_empty(shape)
        whole[: x.shape[0]].copy_(x)
        return whole
    return _zeros(x, shape)


def _chunk(x: Any, dim: int, degree: int) -> Any:
    """The first of `degree` parts: where `_gathered` put this rank's rows."""
    return x.narrow(dim, 0, x.shape[dim] // degree)


_ZEROS: dict[tuple[Any, Any], Any] = {}


def _zeros(x: Any, shape: list[int]) -> Any:
    """Zeros in memory that is kept for the next call: filling it would be timed."""
    import math

    count = math.prod(shape)
    key = (x.dtype, x.device)
    kept = _ZEROS.get(key)
    if kept is None or kept.numel() < count:
        kept = _ZEROS[key] = x.new_zeros(count)
    return kept[:count].view(shape)
