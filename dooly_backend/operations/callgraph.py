"""The call graph of the full model: occurrences with their counts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from dooly_backend.database.records import Occurrence, Signature
from dooly_backend.engines import Engine
from dooly_backend.engines.layers import layers_represented
from dooly_backend.errors import TraceError
from dooly_backend.operations.runnable import Entry, RunnableSet
from dooly_backend.operations.signature import signature_of
from dooly_backend.operations.tree import any_layer, layer_of
from dooly_backend.tracing.trace import Trace


def signatures(trace: Trace, runnable: RunnableSet, engine: Engine) -> dict[Entry, Signature]:
    """The signature of every entry of a runnable set."""
    return {entry: signature_of(entry, trace, engine) for entry in runnable.entries}


def occurrences(engine: Engine, signed: Mapping[Entry, Signature]) -> list[Occurrence]:
    """The configuration's occurrences, counted for the full model, or the rank's stage of it.

    The first layer stands for itself and the first layer of each kind behind
    it for all others of that kind. Raises InputError when too few
    layers are built to show every kind, TraceError when two layers of one
    kind turn out to run different calls, or several of them lie in one entry, since
    the counts would then be wrong.
    """
    represented = layers_represented(engine.layer_kinds, engine.num_layers, engine.stage)
    entries = sorted(signed, key=lambda entry: entry.position)
    _check_kinds(engine, represented, entries, signed)
    found: list[Occurrence] = []
    for entry in entries:
        layer = layer_of(entry.path)
        if layer is None:
            _refuse_layers(entry, represented)
        layers = represented[layer] if layer is not None else ()
        count = len(layers) if layer is not None else 1
        if count:
            found.append(
                Occurrence(
                    len(found),
                    any_layer(entry.path),
                    entry.module_class,
                    signed[entry],
                    count,
                    layers,
                )
            )
    return found


def _refuse_layers(entry: Entry, represented: Mapping[int, tuple[int, ...]]) -> None:
    """Raise TraceError where one entry holds layers, of which the full model has others."""
    inside = (layer_of(op.path) for op in entry.operations)
    if any(len(represented.get(layer, ())) != 1 for layer in inside if layer is not None):
        raise TraceError(
            f"{entry.path or 'the model'} runs only as a whole, its layers included "
            f"({entry.reason}): the full model's cannot be counted from the {len(represented)} "
            "that are built"
        )


def _check_kinds(
    engine: Engine,
    represented: Mapping[int, tuple[int, ...]],
    entries: list[Entry],
    signed: Mapping[Entry, Signature],
) -> None:
    """Every instantiated layer runs what the layer that stands for it runs."""
    by_layer: dict[int, list[tuple[str, str]]] = {}
    for entry in entries:
        layer = layer_of(entry.path)
        if layer is not None:
            by_layer.setdefault(layer, []).append((any_layer(entry.path), signed[entry].hash))
    for layer, calls in by_layer.items():
        if represented[layer]:
            continue
        kind = engine.layer_kinds[layer]
        standing = next(
            i for i in represented if i > 0 and represented[i] and engine.layer_kinds[i] == kind
        )
        for mine, theirs in zip_longest(calls, by_layer.get(standing, ())):
            if mine != theirs:
                raise TraceError(
                    f"layers {standing} and {layer} are both of kind {kind} but differ at "
                    f"{(mine or theirs)[0]}: their counts cannot be told from the configuration"
                )
