"""What several shims need: models that belong together, options, files, a fair sample of steps."""

from __future__ import annotations

import csv
import difflib
import io
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dooly_backend.errors import InputError
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch, Request

#: What models of one export share: a simulator looks at nothing of it.
#: In a manifest's `folded`: what a step takes beyond its operations, or less, in percent of it.
OWN_COST = "the step's own cost (input preparation, launching, glue, output; less what is fused)"
TYPICAL = "decode", "prefill"  # the steps of such percents

_SHARED = ("model", "engine", "backend", "dtype", "kv_cache_dtype", "block_size")


def belonging_together(models: Sequence[LatencyModel], simulator: str) -> list[LatencyModel]:
    """`models` by rising tensor parallelism.

    Raises InputError where they are not one model at different degrees in one
    environment, or are stages of a pipeline.
    """
    if not models:
        raise InputError("nothing to export: give at least one model")
    ordered = sorted(models, key=lambda model: model.configuration.tensor_parallel)
    for what in _SHARED:
        values = sorted({str(getattr(model.configuration, what)) for model in ordered})
        if len(values) > 1:
            raise InputError(
                f"one export holds one {what}, not {' and '.join(values)}: choose one of them"
            )
    if len({model.environment.digest for model in ordered}) > 1:
        devices = ", ".join(sorted({model.environment.device for model in ordered}))
        raise InputError(
            f"one export holds one environment, not several ({devices}): "
            "choose one with --environment"
        )
    degrees = degrees_of(ordered)
    if len(set(degrees)) < len(degrees):
        raise InputError(f"tensor parallel degrees must differ, not {degrees}")
    if any(model.configuration.pipeline_parallel > 1 for model in ordered):
        raise InputError(
            f"{simulator} divides the layers into pipeline stages itself: "
            "export the configuration with pipeline_parallel 1"
        )
    return ordered


def degrees_of(models: Iterable[LatencyModel]) -> list[int]:
    return [model.configuration.tensor_parallel for model in models]


def common_entries(models: Sequence[LatencyModel]) -> dict[str, Any]:
    """What every manifest says of where the numbers are from."""
    model = models[0]
    configuration, environment = model.configuration, model.environment
    return {
        "model": configuration.model,
        "device": environment.device,
        "environment": {
            "digest": environment.digest,
            "device_kind": environment.device_kind,
            "engine": environment.engine,
            "engine_version": environment.engine_version,
            "facts": environment.facts,
        },
        "configurations": [m.configuration.digest for m in models],
        "attention_backend": configuration.backend,
        "dtype": configuration.dtype,
        "kv_cache_dtype": configuration.kv_cache_dtype,
        "quantization": configuration.quantization,
        "block_size": configuration.block_size,
        "execution_mode": configuration.execution_mode,
        "tensor_parallel": degrees_of(models),
        "profiled_at": latest(models),
    }


def latest(models: Iterable[LatencyModel]) -> str | None:
    """When the last of the measurements was made."""
    return max((m.measured_at for m in models if m.measured_at), default=None)


def repository_name(model: str) -> str:
    """`model` as simulators use it in paths: ORG/NAME. Raises InputError where nothing is left."""
    parts = [re.sub(r"[^A-Za-z0-9._-]+", "-", part).strip("-.") for part in model.split("/")]
    parts = [part for part in parts if part]
    if not parts:
        raise InputError(f"the model's name {model!r} has no letters to make a path of")
    return "/".join(parts[-2:]) if len(parts) > 1 else f"local/{parts[0]}"


# -- options ------------------------------------------------------------------


def known_options(
    options: Mapping[str, Any], known: Mapping[str, str], what: str
) -> dict[str, Any]:
    """The options that were given (not None). Raises InputError for one that is not `known`."""
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise InputError(f"{what} has no option {name!r}: {hint}known are {', '.join(known)}")
    return {name: value for name, value in options.items() if value is not None}


def whole_number(name: str, value: Any, smallest: int = 1) -> int:
    """`value`, which may be text. Raises InputError."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = smallest - 1
    if number < smallest or isinstance(value, (bool, float)):
        raise InputError(f"{name} must be a whole number from {smallest}, not {value!r}")
    return number


# -- files --------------------------------------------------------------------


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV with a header."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([cell_text(value) for value in row] for row in rows)
    return buffer.getvalue()


def cell_text(value: Any) -> str:
    """Nine digits: far below any measurement, the same on every machine."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def write(path: Path, content: str | bytes) -> None:
    """Write a file and the folders above it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


# -- samples ------------------------------------------------------------------


def random_batches(
    count: int,
    *,
    max_tokens: int,
    max_seqs: int,
    max_length: int,
    seed: int = 0,
    prefills: int = 1,
) -> list[Batch]:
    """Steps of every kind a scheduler makes, the same for the same arguments.

    In turn decodes, prefills (up to `prefills` in one step, with and without
    history) and both; sizes are spread evenly over their orders of magnitude.
    """
    draw = random.Random(seed)

    def size(first: int, last: int) -> int:
        return round(first * (max(first, last) / first) ** draw.random())

    def decodes(most: int) -> Batch:
        number = size(1, most)
        middle = size(2, max(2, max_length // 2))
        lengths = [round(middle * draw.uniform(0.5, 1.5)) for _ in range(number)]
        return Batch(tuple(Request(1, max(1, min(max_length - 1, n))) for n in lengths))

    def prompts(tokens: int) -> Batch:
        number = draw.randint(1, max(1, min(prefills, tokens // 2)))
        parts = []
        for _ in range(number):
            chunk = size(2, max(2, min(tokens // number, max_length)))
            room = max_length - chunk
            history = size(1, room) if room > 1 and draw.random() < 0.5 else 0
            parts.append(Request(chunk, history))
        return Batch(tuple(parts))

    batches = []
    for index in range(count):
        kind = index % 3 if max_seqs > 1 and max_tokens > 3 else index % 2
        if kind == 0:
            batches.append(decodes(min(max_seqs, max_tokens)))
        elif kind == 1:
            batches.append(prompts(max_tokens))
        else:
            running = decodes(max(1, min(max_seqs - prefills, max_tokens // 2)))
            batches.append(prompts(max_tokens - running.num_tokens) + running)
    return batches
