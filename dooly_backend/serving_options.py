"""Options that `dooly simulate` and `dooly validate` share: what is served, and how."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from dooly_backend import console

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


#: Options that tell which of a model's configurations is meant; all are None where not given.
_FILTERS = ("backend", "tensor_parallel", "kv_cache_dtype", "quantization")
_SOURCE = (
    click.option(
        "--bundle",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="Step times from this bundle (`dooly fit`) instead of --db.",
    ),
    console.database_option,
    console.environment_option,
    click.option(
        "--backend",
        metavar="NAME",
        help="The attention backend. [default: the one that was measured, or the engine's]",
    ),
    click.option(
        "--tp",
        "tensor_parallel",
        type=_POSITIVE,
        help="Tensor-parallel size. [default: the one that was measured, or 1]",
    ),
    console.precision_options,
)

scheduler_option = click.option(
    "--scheduler",
    type=click.Choice(["dooly", "engine"]),
    default="dooly",
    show_default=True,
    help="Whose scheduler decides the simulated batches; the engine's own needs it installed.",
)


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where step times come from, and of which configuration: passed on as one dict `filters`."""
    return _with_options(function, _SOURCE, "filters", _FILTERS)


def scheduler_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """VLLM's scheduler flags, passed on as one dict `serving`; None is vLLM's default."""
    return _with_options(function, tuple(_FLAGS.values()), "serving", tuple(_FLAGS))


def _with_options(
    function: Callable[..., Any],
    options: Sequence[Callable[..., Any]],
    name: str,
    fields: Sequence[str],
) -> Callable[..., Any]:
    """`function` with `options`; values of `fields` are passed on as one dict, `name`."""

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        together = {field: values.pop(field) for field in fields}
        return function(**{name: together}, **values)

    decorated: Callable[..., Any] = command
    for option in reversed(options):
        decorated = option(decorated)
    return decorated
