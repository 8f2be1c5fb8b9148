"""The tables of a bundle: one for each signature, attention's split by phase.

Features follow Vidur's predictor, which Revati's follow: the number of tokens
for most operations, the number of requests for those over requests, and for
attention the chunk and the KV cache of a prefill, the batch size and the KV
cache of decodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from dooly_backend.database.records import Configuration, Occurrence
from dooly_backend.regression.baseline import RoutingLatency
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.regression.whole_steps import is_whole
from dooly_backend.workload import Batch

from ..common import csv_text
from ..times import EXTRAPOLATED, INTERPOLATED, MEASURED, Axes, axes_of

STATISTICS = ("min_us", "mean_us", "median_us", "max_us", "std_us")
#: Every feature's unit and meaning.
FEATURES = {
    "num_tokens": "new tokens of the step",
    "batch_size": "requests of the step; of attention the equal ones of the phase",
    "prefill_chunk_size": "new tokens of one prefill",
    "kv_cache_size": "tokens in the KV cache before the step, of one request",
    "batch": "the requests of the step: COUNTxNEW+CACHED, ...",
    "num_experts": "distinct experts of the rank that the step's tokens activate",
    "size_bytes": "of a collective: the hidden state of num_tokens tokens",
    "num_workers": "of a collective: the ranks that take part",
}
#: What the features of a table are, by what its operation depends on.
BY_KIND: dict[str, tuple[str, ...]] = {
    "tokens": ("num_tokens",),
    "requests": ("batch_size",),
    "routing": ("num_tokens", "num_experts"),
    "constant": (),
}
PREFILL, DECODE, MEASURED_BATCHES = "prefill", "decode", "batch"
COLLECTIVES = ("*all_reduce*", "*all_gather*", "*reduce_scatter*", "*all_to_all*")
_ELEMENT_BYTES = {"float32": 4, "float": 4}
_LAYER = re.compile(r"^(?:.*\.)?(?:layers|h|blocks)\.\*\.?")


@dataclass
class Tables:
    """One degree's files by name, and its part of the manifest."""

    files: dict[str, str] = field(default_factory=dict)
    tables: list[dict[str, Any]] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)


def build_tables(model: LatencyModel) -> Tables:
    """Tables of `model`, one for each signature, in the order of the pass."""
    degree = model.configuration.tensor_parallel
    built = Tables()
    names: dict[str, str] = {}  # table by signature
    taken: set[str] = set()
    axes = axes_of([model])
    for occurrence in model.occurrences:
        op = _unique(operation_name(occurrence), taken)
        signature = occurrence.signature
        if signature.hash not in names:
            names[signature.hash] = op
            _add_tables(built, model, occurrence, op, f"tp{degree}", axes)
        table = names[signature.hash]
        phases = {
            e["phase"]: e["table"] for e in built.tables if e["name"] == table and "phase" in e
        }
        built.operations.append(
            {
                "op": op,
                "table": table,
                **({"phases": phases} if phases else {}),
                **_routing(occurrence),
                "count": occurrence.count,
                "path": occurrence.path,
                "module_class": occurrence.module_class,
                "signature": signature.hash,
                "collective": is_collective(occurrence),
                "whole": is_whole(signature),
            }
        )
    return built


def _routing(occurrence: Occurrence) -> dict[str, Any]:
    """Of a mixture-of-experts layer: the experts that a rank owns, and those of one token."""
    if occurrence.signature.kind != "routing":
        return {}
    routing = json.loads(occurrence.signature.canonical)["routing"]
    return {"routing": {"experts": routing["experts"], "top_k": routing["top_k"]}}


def operation_name(occurrence: Occurrence) -> str:
    """The place in a layer, with the operation's name where that is no module."""
    path = _LAYER.sub("", occurrence.path)
    parts = [path] if path else []
    if occurrence.signature.granularity == "operation" or not path:
        parts.append(occurrence.signature.name)
    return re.sub(r"[^\w.]+", "_", ".".join(parts)).strip("._") or "operation"


def is_collective(occurrence: Occurrence) -> bool:
    return any(fnmatchcase(occurrence.signature.name, pattern) for pattern in COLLECTIVES)


def _unique(name: str, taken: set[str]) -> str:
    number, unique = 1, name
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    taken.add(unique)
    return unique


def _add_tables(
    built: Tables, model: LatencyModel, occurrence: Occurrence, op: str, folder: str, axes: Axes
) -> None:
    kind = occurrence.signature.kind
    group = "collectives" if is_collective(occurrence) else "operations"

    def add(
        name: str,
        features: Sequence[str],
        places: Iterable[tuple[tuple[Any, ...], Batch]],
        shown: Sequence[str] = (),
        phase: str | None = None,
    ) -> None:
        write_rows(name, features, list(_rows(model, occurrence, places)), shown, phase)

    def write_rows(
        name: str,
        features: Sequence[str],
        rows: Sequence[tuple[Any, ...]],
        shown: Sequence[str] = (),
        phase: str | None = None,
    ) -> None:
        if not rows:
            return
        file = f"{folder}/{'attention' if phase else group}/{name}.csv"
        built.files[file] = csv_text([*features, *shown, *STATISTICS, "source"], rows)
        built.tables.append(
            {
                "table": name,
                "name": op,
                "file": file,
                "signature": occurrence.signature.hash,
                "granularity": occurrence.signature.granularity,
                "depends_on": kind,
                **({"phase": phase} if phase else {}),
                "features": list(features),
                **({"columns_for_readers": list(shown)} if shown else {}),
                "rows": len(rows),
                "measured_rows": sum(row[-1] == MEASURED for row in rows),
            }
        )

    if kind == "batch":
        own = _own_axes(model, occurrence, axes)
        add(f"{op}.{PREFILL}", ("prefill_chunk_size", "kv_cache_size"), _prefills(own), (), PREFILL)
        add(f"{op}.{DECODE}", ("batch_size", "kv_cache_size"), _decodes(own), (), DECODE)
        single = [Batch.prefill(1)] if 1 in own.chunks else []
        others = (((batch.key,), batch) for batch in [*single, *own.others])
        add(f"{op}.{MEASURED_BATCHES}", ("batch",), others, (), MEASURED_BATCHES)
        return
    if kind == "routing":
        write_rows(op, BY_KIND[kind], list(_routed_rows(model, occurrence)))
        return
    shown = ("size_bytes", "num_workers") if is_collective(occurrence) and kind == "tokens" else ()
    places = _along(model, occurrence, model.configuration if shown else None)
    add(op, BY_KIND[kind], places, shown)


def _own_axes(model: LatencyModel, occurrence: Occurrence, axes: Axes) -> Axes:
    """Where this signature was measured; all of the model's where it does not say."""
    signature = occurrence.signature.hash
    latency = model.signatures[signature]
    if not latency.points:
        return axes
    return axes_of([_only(model, signature)])


def _only(model: LatencyModel, signature: str) -> LatencyModel:
    return LatencyModel(
        model.configuration,
        model.environment,
        (),
        None,
        {signature: model.signatures[signature]},
    )


def _along(
    model: LatencyModel, occurrence: Occurrence, collective: Configuration | None
) -> Iterator[tuple[tuple[Any, ...], Batch]]:
    """A place for each point that was measured; of a collective with its bytes and ranks."""
    points = model.signatures[occurrence.signature.hash].points
    kind = occurrence.signature.kind
    if kind == "constant":
        yield (), Batch.prefill(1)
    elif kind == "requests":
        for number in sorted({point.num_reqs for point in points if point.num_reqs}):
            yield (number,), Batch.decode(number, 1)
    else:
        for number in sorted({point.num_tokens for point in points if point.num_tokens}):
            shown = () if collective is None else _size(collective, number)
            yield (number, *shown), Batch.prefill(number)


def _size(configuration: Configuration, tokens: int) -> tuple[int, int]:
    """Bytes of the hidden state of `tokens` tokens, and the ranks that share it."""
    config = configuration.hf_config
    hidden = {**config, **(config.get("text_config") or {})}.get("hidden_size") or 0
    element = _ELEMENT_BYTES.get(configuration.dtype, 2)
    return tokens * int(hidden) * element, configuration.tensor_parallel


def _prefills(axes: Axes) -> Iterator[tuple[tuple[Any, ...], Batch]]:
    for chunk in axes.chunks:
        for history in axes.histories:
            if chunk > 1:  # one token after a history is a decode, so its row would have holes
                yield (chunk, history), Batch.prefill(chunk, history)


def _decodes(axes: Axes) -> Iterator[tuple[tuple[Any, ...], Batch]]:
    for size in axes.sizes:
        for context in axes.contexts:
            yield (size, context), Batch.decode(size, context)


def _routed_rows(model: LatencyModel, occurrence: Occurrence) -> Iterator[tuple[Any, ...]]:
    """Every measured number of tokens with every measured number of experts."""
    latency = model.signatures[occurrence.signature.hash]
    assert isinstance(latency, RoutingLatency)
    tokens = sorted({point.num_tokens for point in latency.points if point.num_tokens})
    experts = sorted({point.num_experts for point in latency.points if point.num_experts})
    for count in tokens:
        for fired in experts:
            (values, extrapolated), measured = latency.at_routing(count, fired)
            times = [float(getattr(values, name)) for name in STATISTICS]
            yield (count, fired, *times, _source(measured, extrapolated))


def _rows(
    model: LatencyModel,
    occurrence: Occurrence,
    places: Iterable[tuple[tuple[Any, ...], Batch]],
) -> Iterator[tuple[Any, ...]]:
    for place, batch in places:
        latency = model.occurrence(occurrence, batch)
        times = [float(getattr(latency, name)) for name in STATISTICS]
        yield (*place, *times, _source(latency.measured, latency.extrapolated))


def _source(measured: bool, extrapolated: bool) -> str:
    return EXTRAPOLATED if extrapolated else MEASURED if measured else INTERPOLATED
