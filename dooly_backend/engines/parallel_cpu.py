"""Experts of one expert-parallel rank on a CPU, which vLLM has no kernel for.

vLLM's CPU kernel takes the global numbers of the experts as indices into those
that the rank has, and crashes (seen in 0.32). Here it is called for the pairs of
token and expert that the rank owns, each as a token with one expert: what the
rank would compute, with a gather before and a sum behind. Kernels for GPUs skip
other ranks' experts by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from vllm.model_executor.layers.fused_moe.experts import cpu_moe


@contextmanager
def experts_owned() -> Iterator[None]:
    """VLLM's unquantised CPU experts compute what the rank owns while the block runs."""
    _define()
    whole = cpu_moe.CPUUnquantizedExperts.apply

    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        with patch.object(cpu_moe, "cpu_fused_moe", _owned(kwargs["expert_map"])):
            whole(self, *args, **kwargs)

    with patch.object(cpu_moe.CPUUnquantizedExperts, "apply", apply):
        yield


def _owned(expert_map: torch.Tensor | None) -> Any:
    """VLLM's call of the kernel, with what it leaves out: which experts the rank owns."""
    if expert_map is None:
        return cpu_moe.cpu_fused_moe

    def call(*args: Any) -> None:
        torch.ops.dooly.experts_owned(expert_map, *args)

    return call


@cache
def _define() -> None:
    library = torch.library.Library("dooly", "FRAGMENT")
    # One operation: how many pairs the rank owns depends on values, not on the step.
    library.define(
        "experts_owned(Tensor expert_map, Tensor(a!) output, Tensor x, Tensor w13, Tensor w2, "
        "Tensor? w13_bias, Tensor? w2_bias, Tensor weights, Tensor ids, str activation, str isa, "
        "bool skip_weights) -> ()"
    )
    library.impl("experts_owned", _compute, "CompositeExplicitAutograd")
    _KEPT.append(library)


_KEPT: list[Any] = []
_kernel = cpu_moe.cpu_fused_moe


def _compute(
    expert_map: torch.Tensor,
    output: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *how: Any,
) -> None:
    local = expert_map[ids.long()]
    token, choice = (local >= 0).nonzero(as_tuple=True)
    output.zero_()
    if not len(token):
        return
    part = x.new_empty(len(token), x.shape[1])
    mine = weights[token, choice].unsqueeze(1), local[token, choice].unsqueeze(1).to(ids.dtype)
    _kernel(part, x[token], w13, w2, w13_bias, w2_bias, *mine, *how)
    output.index_add_(0, token, part)
