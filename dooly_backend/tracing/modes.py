"""The two torch modes of the tracer, without a tensor subclass.

`DispatchTracer` sees every operation after dispatch: it records it and labels
its outputs. `FunctionTracer` sees the caller's side: it hands out shapes whose
integers carry their labels, and shows the dispatch rules which labelled
integers a call was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dooly_backend.engines.paths import ModuleStack
from dooly_backend.tracing.labels import LITERAL, NONE, Dim, Label, Shape
from dooly_backend.tracing.rules import MAPPING, Call, TensorShape, preserve
from dooly_backend.tracing.trace import Operation, TensorSpec

_ATTRIBUTE = "_dooly_shape"


class LabelledInt(int):
    """An int that remembers where it comes from, through arithmetic.

    Lost in `int()`, `range`, numpy and `.item()`; the registry of values and
    the differential check cover what is lost.
    """

    label: Label

    def __new__(cls, value: int, label: Label = NONE) -> LabelledInt:
        self = super().__new__(cls, value)
        self.label = label
        return self


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


def stamp(tensor: torch.Tensor, shape: Shape) -> None:
    """Give `tensor` its labels. They hold as long as its size does not change."""
    setattr(tensor, _ATTRIBUTE, shape)


class Labeller:
    """Labels of tensors: the stamped ones, and by the registry of values otherwise."""

    def __init__(self, registry: Mapping[int, Label]) -> None:
        self.registry = dict(registry)

    def shape(self, tensor: torch.Tensor) -> TensorShape:
        stamped = getattr(tensor, _ATTRIBUTE, None)
        sizes = tuple(tensor.size())
        if stamped is not None and tuple(d.size for d in stamped) == sizes:
            return TensorShape(stamped)
        return TensorShape(Dim(int(s), self._known(int(s))) for s in sizes)

    def _known(self, size: int) -> Label:
        return NONE if size == 1 else self.registry.get(size, NONE)


class FunctionTracer(TorchFunctionMode):
    """Labelled shapes for the caller; the caller's labelled integers for the rules."""

    def __init__(self, labeller: Labeller) -> None:
        super().__init__()
        self._labeller = labeller
        self.hints: tuple[Dim, ...] = ()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _SHAPE or func is torch.Tensor.size or func is torch.Tensor.numel:
            return self._sizes(func, args, kwargs)
        before, self.hints = self.hints, _integers(args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self.hints = before

    def _sizes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            shape = self._labeller.shape(args[0])
        if func is torch.Tensor.numel:
            label = NONE
            for dim in shape:
                label = label | dim.label
            return LabelledInt(result, label)
        if isinstance(result, int):
            position = args[1] if len(args) > 1 else kwargs["dim"]
            return LabelledInt(result, shape[position].label)
        return torch.Size([LabelledInt(d.size, d.label) for d in shape])


_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]


def _integers(args: Any, kwargs: Any) -> tuple[Dim, ...]:
    return tuple(
        Dim(int(leaf), label_of(leaf))
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, int) and not isinstance(leaf, bool)
    )


class DispatchTracer(TorchDispatchMode):
    """Records every operation with its labelled dimensions.

    `bodies` are Python bodies of custom operations: their insides are traced
    as operations with the custom operation as parent. `functions` is None for
    a pass that only needs sizes (the differential check).
    """

    def __init__(
        self,
        stack: ModuleStack,
        labeller: Labeller,
        bodies: Mapping[str, Callable[..., Any]],
        functions: FunctionTracer | None,
        label: bool = True,
    ) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._stack = stack
        self._labeller = labeller
        self._bodies = bodies
        self._functions = functions
        self._label = label
        self._parents: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = f"{func.namespace}::{func.__name__}"
        with torch._C.DisableTorchFunction():
            shaped_args, shaped_kwargs = self._shapes((args, kwargs))
            inputs = self._tensors((args, kwargs))
            index = len(self.operations)
            self.operations.append(
                Operation(
                    index,
                    self._stack.path,
                    name,
                    inputs,
                    (),
                    self._scalars((args, kwargs)),
                    self._parents[-1] if self._parents else None,
                    self._stack.call,
                )
            )
        body = self._bodies.get(name.split(".")[0])
        if body is not None and name.startswith("vllm::"):
            result = self._enter(index, body, args, kwargs)
        else:
            result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            if self._label and outputs:
                call = Call(
                    name.split(".")[0],
                    shaped_args,
                    shaped_kwargs,
                    tuple(tuple(t.size()) for t in outputs),
                    self._functions.hints if self._functions else (),
                    self._labeller.registry,
                )
                self._stamp_outputs(call, outputs)
            self.operations[index] = replace(
                self.operations[index], outputs=self._tensors(outputs)
            )
        return result

    def _enter(self, index: int, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a custom operation's body with the modes on, as they are off inside an op."""
        self._parents.append(index)
        try:
            with self.active():
                return body(*args, **kwargs)
        finally:
            self._parents.pop()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Both modes on."""
        if self._functions is None:
            with self:
                yield
        else:
            with self._functions, self:
                yield

    def _stamp_outputs(self, call: Call, outputs: list[torch.Tensor]) -> None:
        rule = MAPPING.get(call.name, preserve)
        shapes = list(rule(call))
        for tensor, shape in zip(outputs, shapes, strict=True):
            sizes = tuple(tensor.size())
            if tuple(d.size for d in shape) != sizes:
                # A rule that computes another size is wrong for this call;
                # shape matching is never wrong about sizes.
                shape = _fallback(call, sizes)
            stamp(tensor, tuple(shape))

    def _shapes(self, tree: Any) -> Any:
        return tree_map(
            lambda leaf: self._labeller.shape(leaf) if isinstance(leaf, torch.Tensor) else leaf,
            tree,
        )

    def _scalars(self, tree: Any) -> tuple[Dim, ...]:
        """Integer arguments. Pointers are left out: they differ from run to run."""
        values = [
            leaf
            for leaf in tree_leaves(tree)
            if isinstance(leaf, int) and not isinstance(leaf, bool) and abs(leaf) < 2**40
        ]
        return tuple(Dim(int(v), self._scalar_label(int(v))) for v in values)

    def _scalar_label(self, value: int) -> Label:
        """The caller's label for the integer, the registry's, or a constant of the code."""
        if not self._label or value < 2:  # 0, 1 and -1 are positions, not sizes
            return NONE
        hints = self._functions.hints if self._functions else ()
        for hint in hints:
            if hint.size == value and hint.label:
                return hint.label
        return self._labeller.registry.get(value) or Label.of(LITERAL, value)

    def _tensors(self, tree: Any) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                tuple(self._labeller.shape(t)),
                str(t.dtype).removeprefix("torch."),
                tuple(t.stride()),
            )
            for t in tree_leaves(tree)
            if isinstance(t, torch.Tensor)
        )


def _fallback(call: Call, sizes: tuple[int, ...]) -> Shape:
    matched = Call(call.name, call.args, call.kwargs, (sizes,), call.hints, call.registry)
    return preserve(matched)[0]

