"""The two torch modes of the tracer, without a tensor subclass.

`DispatchTracer` sees every operation after dispatch: it records it and labels
its outputs. `FunctionTracer` sees the caller's side: it hands out shapes whose
integers carry their labels, and shows the dispatch rules which labelled
integers a call was made with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dooly_backend.engines.compiled import StepMode, uninterrupted
from dooly_backend.engines.launches import showing_launches
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.errors import TraceError
from dooly_backend.tracing.call import Call, Rule, TensorShape, preserve
from dooly_backend.tracing.integers import LabelledInt, label_of
from dooly_backend.tracing.labels import LITERAL, NONE, Dim, Label, Shape
from dooly_backend.tracing.rules import MAPPING
from dooly_backend.tracing.sources import tensor_key
from dooly_backend.tracing.trace import LAUNCHED, Operation, TensorSpec

log = logging.getLogger(__name__)

_ATTRIBUTE = "_dooly_shape"
_numbers = count()


@dataclass(frozen=True)
class RuleSet:
    """Which kinds of rules a pass uses; all of them but in the ablation (paper, Table 4).

    Without preserving rules a mapping rule meets tensors without labels and
    cannot tell what they are made of: that is an error unless `forced`.
    """

    mapping: bool = True
    preserving: bool = True
    forced: bool = False


ALL_RULES = RuleSet()


class Labeller:
    """Labels of tensors: stamped by this labeller's pass, or those of a lasting tensor.

    `registry` knows the sizes of parameters and engine buffers, `requests` the
    values that only the request has in this pass, `tensors` the tensors that
    live longer than a step, by address and sizes.
    """

    def __init__(
        self,
        registry: Mapping[int, Label],
        requests: Mapping[int, Label] | None = None,
        tensors: Mapping[Any, Shape] | None = None,
        rules: RuleSet = ALL_RULES,
    ) -> None:
        self.registry = dict(registry)
        self.requests = dict(requests or {})
        self.rules = rules
        self._tensors = tensors or {}
        self._number = next(_numbers)

    def stamp(self, tensor: torch.Tensor, shape: Shape) -> None:
        """Give `tensor` its labels. They hold as long as its size does not change."""
        setattr(tensor, _ATTRIBUTE, (self._number, shape))

    def shape(self, tensor: torch.Tensor) -> TensorShape:
        sizes = tuple(tensor.size())
        number, stamped = getattr(tensor, _ATTRIBUTE, (None, ()))
        # A stamp of an earlier pass speaks of its sizes, not of these.
        if number == self._number and tuple(d.size for d in stamped) == sizes:
            return TensorShape(stamped)
        lasting = self._tensors.get(tensor_key(tensor)) if self._tensors else None
        if lasting is not None:
            return TensorShape(lasting)
        return TensorShape(Dim(int(s), self._known(int(s))) for s in sizes)

    def _known(self, size: int) -> Label:
        if size < 2:
            return NONE
        return self.requests.get(size) or self.registry.get(size) or NONE


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
        # Every access to `__get__` makes another wrapper: equal, not identical.
        if func is torch.Tensor.size or func is torch.Tensor.numel or func == _SHAPE:
            return self._sizes(func, args, kwargs)
        before, self.hints = self.hints, tuple(_integers((args, kwargs)))
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


def _leaves(tree: Any) -> list[Any]:
    """What a call's arguments hold, containers opened: torch's pytree takes half of a pass."""
    found: list[Any] = []
    _add_leaves(tree, found)
    return found


def _add_leaves(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            _add_leaves(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _add_leaves(item, found)
    else:
        found.append(tree)


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """`tree` with every leaf replaced; lists, tuples and dicts stay what they are."""
    if isinstance(tree, (list, tuple)):
        items = [_mapped(function, item) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {key: _mapped(function, item) for key, item in tree.items()}
    return function(tree)


def _integers(tree: Any) -> Iterator[Dim]:
    """Every integer of a call, in order; slices are opened."""
    for leaf in _leaves(tree):
        if isinstance(leaf, slice):
            yield from _integers((leaf.start, leaf.stop, leaf.step))
        elif isinstance(leaf, int) and not isinstance(leaf, bool):
            yield Dim(int(leaf), label_of(leaf))


class DispatchTracer(StepMode):
    """Records every operation with its labelled dimensions, and launches past the dispatcher.

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

        def run(index: int, call: Call) -> Any:
            body = self._bodies.get(call.name)
            if body is not None and name.startswith("vllm::"):
                return self._enter(index, call, body, args, kwargs)
            return acceptable(func(*args, **kwargs))

        return self._recorded(name, args, kwargs, run)

    def compiled_call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        # dynamo takes no integer that is of a class of its own.
        plain = _mapped(
            lambda leaf: int(leaf) if isinstance(leaf, LabelledInt) else leaf, (args, kwargs)
        )
        return self._recorded(name, args, kwargs, lambda *_: uninterrupted(function, *plain))

    def launched(self, kernel: str) -> None:
        """Record a kernel that the running module launches in code of its own.

        The body of a custom operation is that operation's: what it launches lies under it,
        unless a module that it calls does.
        """
        parent = self._parents[-1] if self._parents else None
        covered = parent is not None and self.operations[parent].call == self._stack.call
        if covered or self._stack.call is None:
            return
        self.operations.append(
            Operation(
                len(self.operations), self._stack.path, LAUNCHED + kernel, (), (), (), parent,
                self._stack.call,
            )
        )  # fmt: skip

    def _recorded(self, name: str, args: Any, kwargs: Any, run: Callable[[int, Call], Any]) -> Any:
        """The result of `run`, recorded as that of operation `name` and labelled."""
        with torch._C.DisableTorchFunction():
            leaves = _leaves((args, kwargs))
            call = self._call(name, args, kwargs)
            index = len(self.operations)
            self.operations.append(
                Operation(
                    index,
                    self._stack.path,
                    name,
                    self._tensors(leaves),
                    (),
                    self._scalars(call, leaves),
                    self._parents[-1] if self._parents else None,
                    self._stack.call,
                )
            )
        result = run(index, call)
        with torch._C.DisableTorchFunction():
            outputs = [t for t in _leaves(result) if isinstance(t, torch.Tensor)]
            if self._label and outputs:
                self._stamp_outputs(call, leaves, outputs)
            self.operations[index] = replace(self.operations[index], outputs=self._tensors(outputs))
        return result

    def _call(self, name: str, args: Any, kwargs: Any) -> Call:
        if self._label:
            args, kwargs = _mapped(self._shaped, (args, kwargs))
        return Call(
            name.split(".")[0],
            args,
            kwargs,
            (),
            self._functions.hints if self._functions else (),
            self._labeller.registry,
            self._labeller.requests,
        )

    def _enter(
        self, index: int, call: Call, body: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a custom operation's body with the modes on, as they are off inside an op.

        Its integers came through the dispatcher as plain ones: their labels
        are given back first.
        """
        if self._label:
            args, kwargs = _mapped(
                lambda leaf: _relabelled(call, leaf) if type(leaf) is int else leaf, (args, kwargs)
            )
        self._parents.append(index)
        try:
            with self.active():
                return body(*args, **kwargs)
        finally:
            self._parents.pop()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Both modes on, and launches past the dispatcher shown to them."""
        with showing_launches(), self.active():
            yield

    @contextmanager
    def active(self) -> Iterator[None]:
        """Both modes on."""
        if self._functions is None:
            with self:
                yield
        else:
            with self._functions, self:
                yield

    def _stamp_outputs(self, call: Call, arguments: Any, outputs: list[torch.Tensor]) -> None:
        """Label the outputs by the operation's rule, or else by shape."""
        given = {id(leaf) for leaf in arguments}
        call = replace(call, outputs=tuple(tuple(t.size()) for t in outputs))
        shapes = self._ruled(call)
        for tensor, shape in zip(outputs, shapes, strict=True):
            if id(tensor) not in given:  # an operation in place returns its argument
                self._labeller.stamp(tensor, shape)

    def _ruled(self, call: Call) -> list[Shape]:
        rules = self._labeller.rules
        mapping = MAPPING.get(call.name)
        if mapping is None:
            if rules.preserving:
                return preserve(call)
        elif rules.mapping:
            if not (rules.preserving or rules.forced):
                _refuse_unknown(call)
            return _checked(mapping, call)
        return [tuple(Dim(size) for size in sizes) for sizes in call.outputs]

    def _shaped(self, leaf: Any) -> Any:
        return self._labeller.shape(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _scalars(self, call: Call, leaves: list[Any]) -> tuple[Dim, ...]:
        """Integer arguments. Pointers are left out: they differ from run to run."""
        values = [
            int(leaf)
            for leaf in leaves
            if isinstance(leaf, int) and not isinstance(leaf, bool) and abs(leaf) < 2**40
        ]
        return tuple(call.given(value) if self._label else Dim(value) for value in values)

    def _tensors(self, leaves: list[Any]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                tuple(self._labeller.shape(t)),
                str(t.dtype).removeprefix("torch."),
                tuple(t.stride()),
            )
            for t in leaves
            if isinstance(t, torch.Tensor)
        )


def _checked(mapping: Rule, call: Call) -> list[Shape]:
    """What a rule gives, where it gives the real sizes: shape matching is never wrong there."""
    try:
        shapes = [tuple(shape) for shape in mapping(call)]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A form of the call that the rule does not know; the check judges the labels.
        log.warning("the rule of %s does not fit a call of it: %r", call.name, error)
        return preserve(call)
    fits = [tuple(d.size for d in shape) for shape in shapes] == list(call.outputs)
    return shapes if fits else _mended(shapes, call)


def _mended(shapes: list[Shape], call: Call) -> list[Shape]:
    """`shapes` with those replaced that do not have the real sizes."""
    right = {tuple(d.size for d in shape): shape for shape in shapes}
    return [
        right.get(sizes, other) for sizes, other in zip(call.outputs, preserve(call), strict=True)
    ]


def acceptable(result: Any) -> Any:
    """What the dispatcher takes back from a mode: no None in a list of tensors.

    FlashAttention 3 leaves tensors of its list undefined; Python sees None,
    which the dispatcher does not take for a tensor. Nobody reads them.
    """
    if isinstance(result, list) and any(item is None for item in result):
        return [torch.empty(0) if item is None else item for item in result]
    return result


def _relabelled(call: Call, value: int) -> int:
    label = call.given(value).label
    return LabelledInt(value, label) if label and label.name != LITERAL else value


def _refuse_unknown(call: Call) -> None:
    """Raise TraceError when a rule would have to guess what a dimension is made of."""
    for shape in call.shapes:
        for dim in shape:
            if dim.size > 1 and not dim.label:
                raise TraceError(
                    f"ambiguous: {call.name} rearranges a dimension of size {dim.size} "
                    "whose origin no rule has told"
                )
