"""A trace: the operations of one pass, every dimension labelled.

The file format is JSON, versioned by `SCHEMA`; `Trace.load` needs no engine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dooly_backend.engines.paths import OUTSIDE
from dooly_backend.errors import InputError
from dooly_backend.tracing.labels import Dim, Label, Source

SCHEMA = 2

#: What the names of kernels begin with that a module launches past the dispatcher.
LAUNCHED = "launched::"

#: Path of operations that run outside every module: input preparation and the like.
STEP = OUTSIDE


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as an operation saw it."""

    dims: tuple[Dim, ...]
    dtype: str  # "bfloat16"
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for dim, stride in zip(reversed(self.dims), reversed(self.strides), strict=True):
            if dim.size != 1 and stride != expected:
                return False
            expected *= dim.size
        return True


@dataclass(frozen=True)
class Operation:
    """One dispatcher call of the pass, or a kernel that a module launches past the dispatcher.

    `path` is the module it ran in and `call` the index of that module's call
    (None outside modules); `parent` is the index of the custom operation whose
    body it belongs to. Scalars are the integer arguments, in order.
    """

    index: int
    path: str
    name: str  # "aten::linear.default"
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    scalars: tuple[Dim, ...] = ()
    parent: int | None = None
    call: int | None = None

    @property
    def is_launch(self) -> bool:
        """Whether it is a kernel that no dispatcher saw: only its name and its place are known."""
        return self.name.startswith(LAUNCHED)

    def dims(self) -> Iterator[Dim]:
        """Every labelled size: inputs, outputs, then scalars."""
        for tensor in (*self.inputs, *self.outputs):
            yield from tensor.dims
        yield from self.scalars


@dataclass(frozen=True)
class Affine:
    """A size as a function of the step: ``constant + tokens*T + requests*R``.

    With a `quantum` T and R are rounded up to multiples of it first, as engines
    do with the buffers that they pad.
    """

    constant: int
    tokens: int
    requests: int
    quantum: int = 1

    def __call__(self, num_tokens: int, num_reqs: int) -> int:
        tokens, requests = (-(-n // self.quantum) * self.quantum for n in (num_tokens, num_reqs))
        return self.constant + self.tokens * tokens + self.requests * requests

    @property
    def from_request(self) -> bool:
        return bool(self.tokens or self.requests)


@dataclass(frozen=True)
class ModuleRecord:
    """One call of a module, in the order of the calls; `caller` is the index of its caller."""

    path: str
    module_class: str
    caller: int | None = None


@dataclass(frozen=True)
class CheckResult:
    """What the differential check found (see `dooly_backend.tracing.differential`)."""

    dimensions: int  # sizes compared with the held-out pass
    predicted: int  # of them predicted exactly by the formulas
    agreeing: int  # of them whose label says what the formula says
    repaired: int  # labels that the formulas corrected
    following: int = 0  # whose label says whether they change when only the requests change
    outside: int = 0  # sizes outside modules that could be compared
    outside_agreeing: int = 0  # of them whose label says what their formula says
    planned: int = 0  # of `dimensions`, sizes that a kernel's scheduler plans: without formula

    @property
    def accuracy(self) -> float:
        """Fraction of the labels that were right before any repair."""
        return self.agreeing / self.dimensions if self.dimensions else 1.0


@dataclass(frozen=True)
class Trace:
    """One traced pass of `num_tokens` tokens in `num_reqs` requests.

    `formulas` has, for every operation of the model, the affine formula of each
    of its `dims()`. `origins` says where the constants of the labels stand: by
    base and value, paths such as "config.hidden_size", "model.norm.weight[0]"
    or "max_num_seqs".
    """

    model: str
    num_tokens: int
    num_reqs: int
    layers: int
    modules: tuple[ModuleRecord, ...]
    operations: tuple[Operation, ...]
    check: CheckResult
    formulas: dict[int, tuple[Affine | None, ...]] = field(default_factory=dict)
    origins: dict[str, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    seconds: float = 0.0
    attempts: int = 1

    def labels(self) -> Counter[str]:
        """How many dimensions have which label."""
        return Counter(dim.label.name for op in self.operations for dim in op.dims())

    def unlabelled(self) -> list[tuple[Operation, Dim]]:
        """Dimensions of size above 1 whose origin no rule found."""
        return [
            (op, dim)
            for op in self.operations
            for dim in op.dims()
            if not dim.label and dim.size > 1
        ]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(_to_json(self), separators=(",", ":")))

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a trace file. Raises InputError when it is none, or of another schema."""
        try:
            value = json.loads(path.read_text())
            if value["schema"] != SCHEMA:
                raise InputError(
                    f"{path} has trace schema {value['schema']}, this Dooly reads {SCHEMA}: "
                    "trace the model again"
                )
            return _from_json(value)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is no Dooly trace ({error})") from None


def _dim_to_json(dim: Dim) -> Any:
    return [dim.size, sorted([s.base, s.value] for s in dim.label.sources)]


def _dim_from_json(value: Any) -> Dim:
    size, sources = value
    return Dim(size, Label(frozenset(Source(base, number) for base, number in sources)))


def _tensor_to_json(tensor: TensorSpec) -> Any:
    return [[_dim_to_json(d) for d in tensor.dims], tensor.dtype, list(tensor.strides)]


def _tensor_from_json(value: Any) -> TensorSpec:
    dims, dtype, strides = value
    return TensorSpec(tuple(_dim_from_json(d) for d in dims), dtype, tuple(strides))


def _formulas_to_json(formulas: Sequence[Affine | None] | None) -> Any:
    if formulas is None:
        return None
    return [None if f is None else [f.constant, f.tokens, f.requests, f.quantum] for f in formulas]


def _to_json(trace: Trace) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": trace.model,
        "num_tokens": trace.num_tokens,
        "num_reqs": trace.num_reqs,
        "layers": trace.layers,
        "seconds": trace.seconds,
        "attempts": trace.attempts,
        "check": vars(trace.check),
        "origins": {
            base: {str(value): list(paths) for value, paths in values.items()}
            for base, values in trace.origins.items()
        },
        "modules": [[m.path, m.module_class, m.caller] for m in trace.modules],
        "operations": [
            {
                "path": op.path,
                "name": op.name,
                "inputs": [_tensor_to_json(t) for t in op.inputs],
                "outputs": [_tensor_to_json(t) for t in op.outputs],
                "scalars": [_dim_to_json(d) for d in op.scalars],
                "parent": op.parent,
                "call": op.call,
                "formulas": _formulas_to_json(trace.formulas.get(op.index)),
            }
            for op in trace.operations
        ],
    }


def _from_json(value: dict[str, Any]) -> Trace:
    operations = tuple(
        Operation(
            index,
            op["path"],
            op["name"],
            tuple(_tensor_from_json(t) for t in op["inputs"]),
            tuple(_tensor_from_json(t) for t in op["outputs"]),
            tuple(_dim_from_json(d) for d in op["scalars"]),
            op["parent"],
            op["call"],
        )
        for index, op in enumerate(value["operations"])
    )
    formulas = {
        index: tuple(None if f is None else Affine(*f) for f in op["formulas"])
        for index, op in enumerate(value["operations"])
        if op["formulas"] is not None
    }
    return Trace(
        value["model"],
        value["num_tokens"],
        value["num_reqs"],
        value["layers"],
        tuple(ModuleRecord(*m) for m in value["modules"]),
        operations,
        CheckResult(**value["check"]),
        formulas,
        {
            base: {int(number): tuple(paths) for number, paths in values.items()}
            for base, values in value["origins"].items()
        },
        value["seconds"],
        value["attempts"],
    )
