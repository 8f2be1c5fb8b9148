"""What runs ahead of a timed call: what keeps a GPU as hot as a step would, and its caches as full.

Two ways, `Ahead`:

- ``product``: the heaviest product of a large step, again and again; then a like call of
  another layer, which warms the code, and the call's predecessor.
- ``layer``: whole layers of a large step, again and again; then all calls from the like
  one of another layer up to the call. A device that gives way to power then runs at the
  clock of the step's own mix, and the code of a layer's other kernels goes through the
  device's instruction caches between two like calls, as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from dooly_backend.engines import CapturedCall
from dooly_backend.operations.tree import layer_of
from dooly_backend.profiling.timer import Timer
from dooly_backend.regression.clock import HEAVY_TOKENS

Ahead = Literal["product", "layer"]
Run = Callable[[CapturedCall], Any]


class Filler:
    """Keeps the device at work ahead of every sample of a large step, and else does nothing.

    A GPU lowers its clock under work that draws much power (by 13% on an H200 whose
    steps are all prefills), and between two samples it would recover.
    """

    def __init__(
        self, run: Run, timer: Timer, calls: Sequence[CapturedCall], ahead: Ahead = "product"
    ) -> None:
        """`run` makes a call of the engine; `calls` are those of the step, in their order."""
        self._run = run
        self._rounds: Iterator[Sequence[CapturedCall]] = cycle([()])
        self._repeats = 0
        heaviest = max(calls, key=products, default=None)
        if heaviest is not None and products(heaviest):
            rounds = [(heaviest,)] if ahead == "product" else by_layer(calls) or [(heaviest,)]
            self._repeats = timer.repeats_until_hot(lambda: self._run_all(rounds[-1]))
            self._rounds = cycle(rounds)
        self.us = timer.BUSY_US if self._repeats else 0.0

    def __call__(self) -> float:
        """How long it keeps the device busy, microseconds. Layers take turns."""
        for _ in range(self._repeats):
            self._run_all(next(self._rounds))
        return self.us

    def _run_all(self, calls: Sequence[CapturedCall]) -> None:
        for call in calls:
            self._run(call)


def by_layer(calls: Sequence[CapturedCall]) -> list[tuple[CapturedCall, ...]]:
    """The calls inside layers, a tuple for each layer, in their order."""
    found: dict[int, list[CapturedCall]] = {}
    for call in calls:
        layer = layer_of(call.path)
        if layer is not None:
            found.setdefault(layer, []).append(call)
    return [tuple(of_layer) for of_layer in found.values()]


def products(call: CapturedCall) -> int:
    """Multiplications of a matrix product with weights; 0 for few tokens, and for all else."""
    tensors = [t for t in tree_leaves((call.args, dict(call.kwargs))) if _is_tensor(t)]
    weights = [t for t in tensors if isinstance(t, torch.nn.Parameter) and t.dim() == 2]
    if isinstance(call.target, torch.nn.Module):
        weights += [p for p in call.target.parameters() if p.dim() >= 2]
    rows = [t.shape[0] for t in tensors if t.dim() == 2 and not isinstance(t, torch.nn.Parameter)]
    if not weights or not rows or rows[0] < HEAVY_TOKENS:
        return 0
    return int(rows[0]) * sum(weight.numel() for weight in weights)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
