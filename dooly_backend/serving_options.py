"""The scheduler flags of vLLM, as `dooly simulate` and `dooly validate` take them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

_POSITIVE = click.IntRange(min=1)

#: Options by the field of `ServingLimits` that they set; all are None where not given.
_FLAGS = {
    "max_num_seqs": click.option("--max-num-seqs", type=_POSITIVE, help="Most requests in a step."),
    "max_num_batched_tokens": click.option(
        "--max-num-batched-tokens",
        type=_POSITIVE,
        help="Most tokens in a step: prompts are computed in chunks of at most so many.",
    ),
    "max_model_len": click.option(
        "--max-model-len", type=_POSITIVE, help="Most tokens of a request, with its output."
    ),
    "num_gpu_blocks": click.option(
        "--num-gpu-blocks", type=_POSITIVE, help="Size of the KV cache in blocks."
    ),
    "kv_cache_gib": click.option(
        "--kv-cache-memory",
        "kv_cache_gib",
        type=click.FloatRange(min=0, min_open=True),
        metavar="GIB",
        help="Size of the KV cache in GiB instead.",
    ),
    "enable_prefix_caching": click.option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=None,
        help="Keep the KV blocks of common prefixes. [default: on]",
    ),
    "enable_chunked_prefill": click.option(
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        default=None,
        help="Compute long prompts in chunks beside decodes. [default: on]",
    ),
    "async_scheduling": click.option(
        "--async-scheduling/--no-async-scheduling",
        default=None,
        help="Schedule a step while the device runs the one before. [default: on, off on a CPU]",
    ),
    "long_prefill_token_threshold": click.option(
        "--long-prefill-token-threshold",
        type=click.IntRange(min=0),
        help="Most tokens of one prompt in a step; 0: no limit of its own.",
    ),
    "policy": click.option(
        "--scheduling-policy",
        "policy",
        type=click.Choice(["fcfs", "priority"]),
        help="In which order requests are served. [default: fcfs]",
    ),
}


def scheduler_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """VLLM's scheduler flags, passed on as one dict `serving`; None is vLLM's default."""

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        serving = {field: values.pop(field) for field in _FLAGS}
        return function(serving=serving, **values)

    decorated: Callable[..., Any] = command
    for option in reversed(_FLAGS.values()):
        decorated = option(decorated)
    return decorated
