"""Signatures: what the model decides of a call, and nothing that the request decides.

The canonical serialisation is JSON (sorted keys, no spaces) of

    {"schema": 1, "granularity": ..., "name": ...,
     "operations": [[name, [input tensors], [output tensors], [scalars]], ...],
     "attributes": {...}, "stateful": {...}, "kernels": {...}}

(and "routing" with the experts of a rank and top-k for mixture-of-experts layers).

A tensor is ``[dtype, layout, [dims]]``; in stateful modules one with dense rows
counts as contiguous. A kernel launched past the dispatcher has its name alone,
and is left out where "stateful" or "routing" say what selects kernels. A
dimension is its value where the model or the code decides it, an affine text such
as "T" or "9*T+1" where the request does, and "E" where the size of an engine
buffer does (also as the constant of such a text: "40*R+E"); "T^8" is T rounded up
to a multiple of 8; "P" is how many parts an engine divides the request's work
into. "@" is a place that a stateful module takes. docs/operations.md has an
example to recompute by hand.

The signature is the SHA-256 of that text, so anyone can recompute it from the
database.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from dooly_backend.database.records import Signature, canonical_json
from dooly_backend.engines import Engine
from dooly_backend.operations.runnable import Entry
from dooly_backend.operations.tree import is_collective, layer_of
from dooly_backend.tracing.labels import ENGINE, REQUEST_BASES, Dim
from dooly_backend.tracing.trace import Affine, Operation, TensorSpec, Trace
from dooly_backend.workload import PointKind

SCHEMA = 1

#: Attributes that name or number the instance, or say what it is a shard of: another layer's
#: or rank's differ, its time does not. A shard's own sizes are in its operations.
_IDENTITY = frozenset(
    {
        "input_size",
        "output_size",
        "total_num_heads",
        "total_num_kv_heads",
        "tp_size",
        "layer_name",
        "prefix",
        "layer_idx",
        "layer_id",
        "layer_index",
        "training",
        "call_super_init",
        "tp_rank",
    }
)
#: The place in a tensor that an operation takes; recurrent layers take the block of a request's
#: state, which the engine hands out. Written as "@".
_SELECT, _SELECT_SCALARS = "aten::select.int", 2

_Attribute = int | float | bool | str | None


def signature_of(entry: Entry, trace: Trace, engine: Engine) -> Signature:
    """The signature of a runnable entry."""
    stateful = entry.path in engine.stateful
    layer = engine.moe.get(entry.path)
    value = {
        "schema": SCHEMA,
        "granularity": entry.granularity,
        "name": entry.name,
        # Collectives are not timed: what is measured is the same with and without them.
        "operations": [
            _operation(op, trace.formulas.get(op.index, ()), stateful)
            for op in entry.operations
            if not is_collective(op) and not (op.is_launch and (stateful or layer is not None))
        ],
        "attributes": _attributes(entry, engine),
        "stateful": engine.stateful_identity(entry.path) if stateful else {},
        "kernels": engine.kernel_identity(),
    }
    if layer is not None:
        value["routing"] = {"experts": layer.experts, "top_k": layer.top_k}
    kind = "routing" if layer is not None else kind_of(entry, trace)
    return Signature(entry.name, entry.granularity, kind, canonical_json(value))


def kind_of(entry: Entry, trace: Trace) -> PointKind:
    """What of the request the call's latency depends on, from the formulas of its sizes.

    Those of a kernel that no dispatcher saw are not known: it may depend on anything.
    """
    if entry.stateful or any(op.is_launch for op in entry.operations):
        return "batch"
    formulas = [f for op in entry.operations for f in trace.formulas.get(op.index, ()) if f]
    tokens = any(f.tokens for f in formulas)
    requests = any(f.requests for f in formulas)
    if tokens and requests:
        return "batch"
    return "tokens" if tokens else "requests" if requests else "constant"


def _attributes(entry: Entry, engine: Engine) -> dict[str, Any]:
    """Attributes of an entry's module and, under "inside", of the modules that run in it."""
    if entry.granularity == "operation":
        return {}
    found = attributes(engine.module(entry.path), entry.path)
    paths = sorted({op.path for op in entry.operations} - {entry.path})
    if paths:
        found["inside"] = {
            path.removeprefix(entry.path): attributes(engine.module(path), path) for path in paths
        }
    return found


def attributes(module: Any, path: str) -> dict[str, Any]:
    """Primitive attributes of a module and of the implementation it holds, without its identity.

    They stand for branches that no kernel name shows (a sliding window, a
    soft cap, an activation's variant).
    """
    found = _primitives(vars(module), path)
    implementation = getattr(module, "impl", None)
    if implementation is not None:
        found["impl"] = {
            "class": type(implementation).__name__,
            **_primitives(vars(implementation), path),
        }
    elif (quantization := _quantization(module, path)) is not None:
        found["quantization"] = quantization
    return found


def _quantization(module: Any, path: str) -> dict[str, Any] | None:
    """How the weights of a module are quantised; None where they are not.

    Kernels that bypass the dispatcher (Triton's of a mixture of experts) show neither the
    method nor the number formats of weights and scales.
    """
    method = getattr(module, "quant_method", None)
    method = getattr(method, "old_quant_method", method)  # what vLLM's modular MoE method wraps
    if method is None or type(method).__name__.startswith("Unquantized"):
        return None
    kinds = {n: v.value for n, v in sorted(vars(method).items()) if isinstance(v, Enum)}
    scheme = getattr(module, "scheme", None)
    return {
        "class": type(method).__name__,
        **_primitives(vars(method), path),
        **_primitives(kinds, path),
        **({} if scheme is None else {"scheme": type(scheme).__name__}),
        "parameters": {
            name: str(parameter.dtype).removeprefix("torch.")
            for name, parameter in sorted(module.named_parameters(recurse=False))
        },
    }


def _primitives(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    return {
        name: value
        for name, value in sorted(values.items())
        if isinstance(value, _Attribute)
        and not name.startswith("_")
        and name not in _IDENTITY
        and not (isinstance(value, str) and _is_place(value, path))
    }


def _is_place(value: str, path: str) -> bool:
    """Whether a text names this module, one around it, or one in another layer."""
    return "." in value and (value in path or layer_of(value) is not None)


def _operation(
    op: Operation, formulas: Sequence[Affine | None], stateful: bool = False
) -> list[Any]:
    remaining = iter(formulas or [None] * len(list(op.dims())))

    def dim(size: Dim) -> Any:
        return _dim(size, next(remaining))

    def tensor(spec: TensorSpec) -> list[Any]:
        return [spec.dtype, _layout(spec, stateful), [dim(d) for d in spec.dims]]

    inputs = [tensor(t) for t in op.inputs]
    outputs = [tensor(t) for t in op.outputs]
    scalars = [dim(d) for d in op.scalars]
    if stateful and op.name == _SELECT and len(scalars) == _SELECT_SCALARS:
        scalars[-1] = "@"
    return [op.name, inputs, outputs, scalars]


def _layout(spec: TensorSpec, stateful: bool) -> str:
    """Whether the tensor is dense, or for a stateful module at least its rows are.

    The query of most models is a slice of the QKV projection, that of a model
    with QK-norm a tensor of its own. Attention steps from token to token by the
    stride that it is given, and takes as long.
    """
    if spec.is_contiguous or (stateful and _has_dense_rows(spec)):
        return "contiguous"
    return "strided"


def _has_dense_rows(spec: TensorSpec) -> bool:
    """Whether only the rows, one for each token or request, are apart."""
    rest = TensorSpec(spec.dims[1:], spec.dtype, spec.strides[1:])
    row = math.prod(dim.size for dim in rest.dims)
    return spec.dims[0].label.from_request and rest.is_contiguous and spec.strides[0] >= row


def _dim(dim: Dim, formula: Affine | None) -> Any:
    if ENGINE in dim.label.bases:
        return "E"
    if formula is None and dim.label.from_request:
        return "P"
    if formula is None or not formula.from_request:
        return dim.size
    up = f"^{formula.quantum}" if formula.quantum > 1 else ""
    parts = [
        f"{name}{up}" if factor == 1 else f"{factor}*{name}{up}"
        for factor, name in ((formula.tokens, "T"), (formula.requests, "R"))
        if factor
    ]
    if abs(formula.constant) > 1 and dim.label.bases <= REQUEST_BASES:
        parts.append("E")  # not the model's: a workspace of the engine, or of its threads
    elif formula.constant:
        parts.append(str(formula.constant))
    return "+".join(parts)
