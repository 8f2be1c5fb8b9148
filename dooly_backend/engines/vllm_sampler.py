"""The sampler of vLLM's V2 model runner as a module."""

from __future__ import annotations

from typing import Any

import torch


class Sampler(torch.nn.Module):
    """Wraps the plain callable that the V2 runner samples with: hooks only see modules.

    Everything but the call is the wrapped sampler's. It is held as `impl`, as
    attention holds what implements it: a signature has its attributes, too.
    """

    def __init__(self, inner: Any) -> None:
        super().__init__()
        object.__setattr__(self, "impl", inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.impl(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "impl"), name)
