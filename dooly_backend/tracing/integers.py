"""Integers that carry their label, and where an object keeps integers and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch

from dooly_backend.tracing.labels import NONE, Label

#: How far to follow plain objects: an attention implementation is one step from its module,
#: a buffer of a block table five from the runner.
_DEPTH = 5

#: Packages whose objects hold nothing that sizes a tensor of the model.
_FOREIGN = frozenset({"builtins", "torch", "numpy", "logging", "threading", "functools", "weakref"})


class LabelledInt(int):
    """An int that remembers where it comes from, through arithmetic.

    Lost in `int()`, `range`, numpy and `.item()`; what the request decides is
    then known by its value, and the differential check finds the rest.
    """

    label: Label

    def __new__(cls, value: int, label: Label = NONE) -> LabelledInt:
        self = super().__new__(cls, value)
        self.label = label
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def label_of(value: Any) -> Label:
    """The label of an integer, `NONE` for a plain one."""
    return value.label if isinstance(value, LabelledInt) else NONE


def _arithmetic(name: str) -> Callable[[LabelledInt, Any], Any]:
    plain = getattr(int, name)

    def operation(self: LabelledInt, other: Any) -> Any:
        result = plain(self, other)
        if type(result) is not int:  # NotImplemented, or a float of true division
            return result
        return LabelledInt(result, self.label | label_of(other))

    operation.__name__ = name
    return operation


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _prefix in ("__", "__r"):
        setattr(LabelledInt, f"{_prefix}{_name}__", _arithmetic(f"{_prefix}{_name}__"))


def _unary(name: str) -> Callable[[LabelledInt], LabelledInt]:
    plain = getattr(int, name)

    def operation(self: LabelledInt) -> LabelledInt:
        return LabelledInt(plain(self), self.label)

    operation.__name__ = name
    return operation


for _name in ("__neg__", "__pos__", "__abs__"):  # -(-a // b) rounds up
    setattr(LabelledInt, _name, _unary(_name))


Holder = MutableMapping[str, Any]


class Cells(Holder):
    """What a function closes over, by name; it can be replaced, not added to."""

    def __init__(self, function: FunctionType) -> None:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._cells = {name: cell for name, cell in cells if not _is_empty(cell)}

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        raise TypeError("a function keeps what it closes over")

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


@dataclass(frozen=True)
class Slot:
    """A place that holds an integer, or a list or tuple of integers."""

    owner: Holder  # the attributes it is one of, or what a function closes over
    name: str
    path: str

    @property
    def value(self) -> Any:
        return self.owner[self.name]

    def labelled(self, label: Callable[[str, int], Label]) -> Any:
        """The value with labels on; the value itself where nothing wants one."""
        value = self.value
        if isinstance(value, int):
            found = label(self.name, int(value))
            return LabelledInt(value, found) if found else value
        items = [LabelledInt(item, label(self.name, int(item))) for item in value]
        return torch.Size(items) if isinstance(value, torch.Size) else type(value)(items)


def slots(owner: object, path: str, seen: set[int]) -> Iterator[Slot]:
    """Where `owner`, and the plain objects it holds, keep integers above 1.

    Modules inside modules are left to their own call. `seen` has the ids of
    the objects that need no second look, and is added to.
    """
    for attributes, where in _attributes(owner, path, _DEPTH, seen):
        for name, value in list(attributes.items()):
            if _is_size(value) or _is_list_of_sizes(value):
                yield Slot(attributes, name, f"{where}.{name}" if where else name)


def tensors_of(owner: object, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that `owner` and the plain objects it holds keep, parameters aside."""
    for attributes, where in _attributes(owner, "", _DEPTH, seen):
        for name, value in list(attributes.items()):
            items = value if isinstance(value, (list, tuple)) else [value]
            for tensor in items:
                if isinstance(tensor, torch.Tensor):
                    yield f"{where}.{name}" if where else name, tensor


def _attributes(
    owner: object, path: str, depth: int, seen: set[int]
) -> Iterator[tuple[Holder, str]]:
    """Attributes of `owner`, of the plain objects it holds and of its functions; with paths.

    An engine that packs a weight keeps it and its sizes, or a handle that has them, in
    what a function of the layer closes over.
    """
    attributes = getattr(owner, "__dict__", None)
    if not isinstance(attributes, dict) or id(owner) in seen:
        return
    seen.add(id(owner))
    yield attributes, path
    if depth == 0:
        return
    for name, value in list(attributes.items()):
        where = f"{path}.{name}" if path else name
        inside = _bound(value)
        if inside and id(value) not in seen:
            seen.add(id(value))
            yield inside, where
        for item in _opened(value):
            yield from _attributes(item, where, depth - 1, seen)


def _bound(value: Any) -> Holder:
    """What a function closes over, or a partial one is given by name; empty for all else."""
    if isinstance(value, FunctionType) and not _is_foreign(value.__module__):
        return Cells(value)
    return value.keywords if isinstance(value, partial) else {}


def _opened(value: Any) -> Iterator[Any]:
    """The plain objects that an attribute leads to: itself, a list's, those a function holds."""
    if isinstance(value, (list, tuple)):
        items: Iterable[Any] = value[:8]
    elif isinstance(value, FunctionType):
        items = [*Cells(value).values(), *(value.__defaults__ or ())]
    elif isinstance(value, partial):
        items = [*value.args, *value.keywords.values()]
    else:
        items = [value]
    return (item for item in items if _is_plain_object(item))


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return True
    return False


def _is_plain_object(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, torch.nn.Module, torch.Tensor, Enum))
        and not callable(value)
        # The engine's validated settings are shared by everything, and size nothing directly.
        and not hasattr(kind, "__pydantic_fields__")
        and not _is_foreign(kind.__module__)
    )


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FOREIGN


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, (bool, Enum)) and value > 1


def _is_list_of_sizes(value: Any) -> bool:
    return (
        type(value) in (list, tuple, torch.Size)
        and 0 < len(value) < 64
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        and any(v > 1 for v in value)
    )
