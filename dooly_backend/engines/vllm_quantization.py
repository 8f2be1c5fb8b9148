"""What quantisation adds to vLLM's models: modules that no module owns, and KV-cache scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: Attributes by which a layer holds how it is quantised.
_HOLDERS = ("quant_method", "scheme")
_DEPTH = 3  # of objects between the layer and the module: method, kernel, kernel it falls back to

_SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale")


def unowned_modules(modules: Mapping[str, Any]) -> dict[str, Any]:
    """Modules that the quantisation of one of `modules` holds in plain objects, by path.

    A linear layer's kernel quantises its input by such a one, ``QuantFP8``
    (`model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py`), of which
    `named_modules` knows nothing. Its path is that of the attributes:
    "model.layers.0.mlp.down_proj.quant_method.fp8_linear.quant_fp8".
    """
    seen = {id(module) for module in modules.values()}
    found: dict[str, Any] = {}
    for path, module in modules.items():
        for holder in _HOLDERS:
            held = vars(module).get(holder)
            if held is not None:
                prefix = f"{path}.{holder}" if path else holder
                found |= dict(_modules_in(held, prefix, seen, _DEPTH))
    return found


def _modules_in(held: Any, prefix: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    from torch.nn import Module

    if id(held) in seen or not type(held).__module__.startswith("vllm."):
        return
    seen.add(id(held))
    for name, value in vars(held).items() if hasattr(held, "__dict__") else ():
        if isinstance(value, Module):
            if id(value) not in seen:
                seen.add(id(value))
                yield f"{prefix}.{name}", value
        elif depth > 1:
            yield from _modules_in(value, f"{prefix}.{name}", seen, depth - 1)


def neutral_scales(model: Any) -> None:
    """Set the scales of every KV cache to 1: dummy weights make them tiny, or negative.

    A negative one the CPU's kernels refuse; none changes how long a kernel takes.
    """
    import torch

    with torch.inference_mode():  # vLLM may have made them in it
        for module in model.modules():
            for name in _SCALES:
                for scale in (getattr(module, name, None), getattr(module, f"{name}_cpu", None)):
                    if isinstance(scale, torch.Tensor):
                        scale.fill_(1.0)
                if hasattr(module, f"{name}_float"):
                    setattr(module, f"{name}_float", 1.0)
