"""vLLM's mixture-of-experts layers: which there are, and a hook that routes them.

Every MoE architecture of vLLM calls ``router.select_experts`` of its MoE
runner, and computes with the expert ids that this returns
(`vllm/model_executor/layers/fused_moe/runner/moe_runner.py`, the same in
0.25.1 and 0.32). The hook lets the router do its work, whose time is part of
the layer, and replaces the ids (paper appendix J.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from dooly_backend.engines.base import MoeLayer, Routing
from dooly_backend.errors import EngineError


def moe_layers(modules: Mapping[str, Any]) -> dict[str, MoeLayer]:
    """The MoE layers among `modules`, by path."""
    found = {}
    for path, module in modules.items():
        router, config = getattr(module, "router", None), getattr(module, "moe_config", None)
        if hasattr(router, "select_experts") and config is not None:
            rank = int(getattr(config, "ep_rank", 0))
            owned = int(config.num_local_experts)
            found[path] = MoeLayer(owned, int(config.experts_per_token), rank * owned)
    return found


@contextmanager
def routed(modules: Mapping[str, Any], layers: Mapping[str, MoeLayer], how: Routing) -> Iterator:
    """Route every MoE layer as `how` says while the block runs.

    Raises EngineError for more experts than a layer has.
    """
    restored: list[tuple[Any, Callable[..., Any]]] = []
    try:
        for path, layer in layers.items():
            router = modules[path].router
            restored.append((router, router.select_experts))
            router.select_experts = _hook(router.select_experts, layer, how)
        yield
    finally:
        for router, original in restored:
            router.select_experts = original


@contextmanager
def graphs_routed() -> Iterator[None]:
    """Engines started meanwhile capture their graphs with experts drawn at random.

    What a graph replays was decided when it was captured: later hooks are too late
    for it. All injected requests hold the same tokens, so that without this a batch
    of decodes would wake the experts of one token. Captured after a warm-up of
    the same size (`capture_model`), the ids are on the device by then.
    """
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.compile_or_warm_up_model

    def routed_first(worker: Any) -> Any:
        modules = dict(worker.model_runner.model.named_modules())
        for path, layer in moe_layers(modules).items():
            router = modules[path].router
            router.select_experts = _hook(router.select_experts, layer, "uniform")
        return original(worker)

    Worker.compile_or_warm_up_model = routed_first
    try:
        yield
    finally:
        Worker.compile_or_warm_up_model = original


def _hook(original: Callable[..., Any], layer: MoeLayer, how: Routing) -> Callable[..., Any]:
    if isinstance(how, int) and not 1 <= how <= layer.experts:
        raise EngineError(f"{how} experts cannot fire where a rank has {layer.experts}")

    def select_experts(*args: Any, **kwargs: Any) -> Any:
        weights, ids, *rest = original(*args, **kwargs)
        tokens, top_k = (int(size) for size in ids.shape)
        return weights, _ids(tokens, top_k, layer, how, ids.device, ids.dtype), *rest

    return select_experts


@lru_cache(maxsize=512)
def _ids(tokens: int, top_k: int, layer: MoeLayer, how: Routing, device: Any, dtype: Any) -> Any:
    """Expert ids (tokens, top_k), no expert twice for a token where there are enough.

    An integer makes exactly that many experts fire, evenly, as far as the
    tokens suffice; "uniform" draws them at random, the same for equal sizes.
    They are kept on the device: a copy to it is no part of the layer's time.
    """
    import torch

    if how == "uniform":
        generator = torch.Generator().manual_seed(tokens)
        drawn = torch.rand(tokens, layer.experts, generator=generator).topk(top_k).indices
        chosen = drawn + layer.first
    else:
        chosen = torch.arange(tokens * top_k).view(tokens, top_k) % how + layer.first
    return chosen.to(device, dtype)
