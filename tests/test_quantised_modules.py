"""Modules that a layer's quantisation holds in plain objects, and the scales of KV caches."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dooly_backend.engines.paths import ModuleStack
from dooly_backend.engines.vllm_quantization import neutral_scales, unowned_modules


class Plain:
    """A kernel or method of vLLM: no module."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


Plain.__module__ = "vllm.model_executor.kernels.linear"


class Quantise(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Plain(fp8_linear=Plain(quant_fp8=Quantise()), layer=self)
        self.quant_method.fp8_linear.back = self.quant_method  # a cycle ends

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.fp8_linear.quant_fp8(x)


HELD = "quant_method.fp8_linear.quant_fp8"


def test_they_are_found_by_the_attributes_that_lead_to_them() -> None:
    model = torch.nn.Sequential(Linear(), Linear())
    modules = dict(model.named_modules())
    found = unowned_modules(modules)
    assert found == {f"{i}.{HELD}": model[i].quant_method.fp8_linear.quant_fp8 for i in (0, 1)}
    # and that is the path under which they run
    stack = ModuleStack(modules | found)
    with stack.tracking():
        model(torch.zeros(1))
    assert [path for path, *_ in stack.entered] == ["", "0", f"0.{HELD}", "1", f"1.{HELD}"]


def test_one_that_is_owned_or_of_others_is_not_among_them() -> None:
    owner = torch.nn.Module()
    owner.child = Quantise()
    owner.quant_method = Plain(kernel=owner.child)

    class Foreign(Plain):
        pass

    Foreign.__module__ = "elsewhere"
    owner.scheme = Foreign(kernel=Quantise())
    assert unowned_modules(dict(owner.named_modules())) == {}


def test_scales_of_a_cache_are_one() -> None:
    attention = torch.nn.Module()
    attention.register_buffer("_k_scale", torch.tensor(-1e-4))
    attention._k_scale_float = -1e-4
    attention._v_scale = torch.tensor(0.5)
    neutral_scales(torch.nn.Sequential(attention))
    assert attention._k_scale.item() == attention._k_scale_float == attention._v_scale.item() == 1
