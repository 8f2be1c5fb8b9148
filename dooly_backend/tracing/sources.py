"""Source labelling: the values that enter a pass, and whose they are.

`model_config` needs a path to a configuration value, or the shape or an
attribute of a module built from one; sizes of buffers that the engine makes
for its own limits are `engine`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dooly_backend.engines import Engine
from dooly_backend.tracing.labels import ENGINE, MODEL_CONFIG, NUM_REQS, NUM_TOKS, Source


def model_sources(engine: Engine) -> set[Source]:
    """Integers of the HF configuration and of the modules built from it."""
    values = set(_integers(engine.configuration.hf_config))
    for module in engine.modules.values():
        values |= {v for v in vars(module).values() if _is_size(v)}
        for tensor in _parameters(module):
            values |= set(tensor.shape)
    return {Source(MODEL_CONFIG, int(v)) for v in values if v > 1}


def engine_sources(engine: Engine) -> set[Source]:
    """Sizes of the engine's own buffers: limits, KV-cache blocks."""
    facts = engine.buffer_sizes()
    return {Source(ENGINE, int(v)) for v in facts if v > 1}


def request_sources(num_tokens: int, num_reqs: int) -> set[Source]:
    """What a step of these sizes brings; metadata has one entry more than requests."""
    return {
        Source(NUM_TOKS, num_tokens),
        Source(NUM_REQS, num_reqs),
        Source(NUM_REQS, num_reqs + 1),
    }


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 1


def _integers(value: Any) -> Iterator[int]:
    if _is_size(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _integers(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _integers(item)


def _parameters(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
