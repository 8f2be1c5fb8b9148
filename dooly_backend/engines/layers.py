"""Which layers of a model are alike, read from its HF configuration.

A model is instantiated with as few layers as show every distinct kind of
layer; counts are always those of the full model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dooly_backend.errors import InputError


def layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A name for the kind of every layer of the model described by an HF config.

    Layers with the same name run the same operations at the same sizes.
    `config` is the configuration as transformers completes it (its
    `layer_types`), or the plain config.json.
    """
    count = int(config["num_hidden_layers"])
    attention = _attention_kinds(config, count)
    feed_forward = _feed_forward_kinds(config, count)
    return tuple(f"{a}/{f}" for a, f in zip(attention, feed_forward, strict=True))


def layers_needed(kinds: Sequence[str], stage: range | None = None) -> int:
    """The shortest prefix that shows every kind of layer, but at least two layers.

    `stage` are the layers of a pipeline stage, all of them by default. The
    model's first layer stands for itself alone: it has no residual to add, which
    makes its norm another operation. Every other kind must show up behind it.
    Two layers let one layer's weights be cold while the code is warm.
    """
    stage = stage if stage is not None else range(len(kinds))
    wanted = {kinds[i] for i in stage if i > 0}
    for index in stage:
        if index > 0:
            wanted.discard(kinds[index])
        if not wanted and index > stage.start:
            return index + 1 - stage.start
    return len(stage)


def layers_represented(
    kinds: Sequence[str], instantiated: int, stage: range | None = None
) -> dict[int, tuple[int, ...]]:
    """For every instantiated layer, the layers of the full model that it stands for.

    `stage` are the layers of a pipeline stage, of which the first `instantiated`
    are built; without it, all of the model's. The model's first layer stands for
    itself, the first other layer of a kind for all others of that kind in the
    stage, further ones for none. Raises InputError when a kind is not instantiated.
    """
    stage = stage if stage is not None else range(len(kinds))
    stands_for: dict[int, tuple[int, ...]] = {}
    representative: dict[str, int] = {}
    for index in stage[:instantiated]:
        if index == 0:
            stands_for[index] = (0,)
            continue
        first = representative.setdefault(kinds[index], index)
        stands_for[index] = (
            tuple(i for i in stage if i > 0 and kinds[i] == kinds[index]) if first == index else ()
        )
    missing = {kinds[i] for i in stage if i > 0} - set(representative)
    if missing:
        raise InputError(
            f"--layers {instantiated} does not show every kind of layer: "
            f"{', '.join(sorted(missing))} would be missing; "
            f"build at least --layers {layers_needed(kinds, stage)}"
        )
    return stands_for


def _attention_kinds(config: Mapping[str, Any], count: int) -> list[str]:
    types = config.get("layer_types")
    if types:
        return [str(t) for t in types[:count]]
    blocks = config.get("layers_block_type")
    if blocks:
        return [str(b) for b in blocks[:count]]
    pattern = config.get("sliding_window_pattern")
    if pattern and config.get("sliding_window"):
        return ["full" if (i + 1) % int(pattern) == 0 else "sliding" for i in range(count)]
    return ["attention"] * count


def _feed_forward_kinds(config: Mapping[str, Any], count: int) -> list[str]:
    experts = next(
        (
            config[name]
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if config.get(name)
        ),
        None,
    )
    if not experts:
        return ["dense"] * count
    dense_first = int(config.get("first_k_dense_replace") or 0)
    sparse_step = int(config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1)
    dense_only = set(config.get("mlp_only_layers") or ())

    def kind(index: int) -> str:
        if index < dense_first or index in dense_only:
            return "dense"
        # Qwen2-MoE counts from 1, DeepSeek's moe_layer_freq from 0; with the
        # usual step of 1 they agree.
        offset = 1 if "decoder_sparse_step" in config else 0
        return "moe" if (index + offset) % sparse_step == 0 else "dense"

    return [kind(i) for i in range(count)]
