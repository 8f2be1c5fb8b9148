"""Source labelling: the values that enter a pass, whose they are, and where they stand.

`model_config` needs a path: to a value of the HF configuration, to an integer
that a module of the model holds, or to the shape of a parameter. Limits of the
engine and what it sizes by them (KV caches, block tables, input buffers) are
`engine`. Integers are labelled where they stand, for the length of a pass
(`Sources.tainted`); tensors by their memory; so a constant of the code that
happens to equal a model's value is not mistaken for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dooly_backend.engines import Engine
from dooly_backend.tracing.integers import Holder, LabelledInt, slots, tensors_of
from dooly_backend.tracing.labels import (
    ENGINE,
    MODEL_CONFIG,
    NUM_REQS,
    NUM_TOKS,
    Dim,
    Label,
    Shape,
    Source,
    labels_by_value,
)

#: Paths kept for a value: enough to recognise it by.
_PATHS = 3

TensorKey = tuple[int, tuple[int, ...]]  # address and sizes


@dataclass
class Sources:
    """Everything in an engine that can decide a size, before any request comes."""

    #: Where each source stands: "config.hidden_size", "model.norm.weight[0]", "max_num_seqs".
    origins: dict[Source, list[str]] = field(default_factory=dict)
    #: Labels of the tensors that live longer than a step.
    tensors: dict[TensorKey, Shape] = field(default_factory=dict)
    #: Of `origins`, what sizes tensors or the whole model: what a size can be known by.
    sizes: set[Source] = field(default_factory=set)
    #: Integers to label while a pass runs: what holds it, its name there, labelled value.
    _slots: list[tuple[Holder, str, Any]] = field(default_factory=list)
    #: Keeps the memory of `tensors` from being used for others.
    _alive: list[torch.Tensor] = field(default_factory=list)

    @property
    def registry(self) -> dict[int, Label]:
        """Labels by value, for the sizes that no tensor or integer of a pass accounts for."""
        return labels_by_value(self.sizes)

    def add(self, base: str, value: int, path: str, is_size: bool = True) -> Label:
        """Note that `value` stands at `path`; returns its label. Values below 2 have none."""
        if value < 2:
            return Label()
        if is_size:
            self.sizes.add(Source(base, value))
        paths = self.origins.setdefault(Source(base, value), [])
        if len(paths) < _PATHS and path not in paths:
            paths.append(path)
        return Label.of(base, value)

    def add_tensor(self, tensor: torch.Tensor, shape: Shape) -> None:
        """Note the labels of a lasting tensor, unless another owner did before."""
        key = tensor_key(tensor)
        if key is not None and key not in self.tensors:
            self.tensors[key] = shape
            self._alive.append(tensor)

    @contextmanager
    def tainted(self) -> Iterator[None]:
        """Every integer of the model and of the engine carries its label in this block."""
        before = [(owner, name, owner[name]) for owner, name, _ in self._slots]
        for owner, name, labelled in self._slots:
            owner[name] = labelled
        try:
            yield
        finally:
            for (owner, name, plain), (*_, labelled) in zip(before, self._slots, strict=True):
                # What the pass itself wrote (a counter) stays, as a plain number.
                current = owner.get(name, plain)
                if current is labelled:
                    owner[name] = plain
                elif isinstance(current, LabelledInt):
                    owner[name] = int(current)


def collect(engine: Engine) -> Sources:
    """The sources of `engine`: configuration, modules and parameters, then its own buffers."""
    sources = Sources()
    for path, value in _config_integers(engine.configuration.hf_config, "config"):
        sources.add(MODEL_CONFIG, value, path)
    limits = dict(engine.limits)
    for name, value in limits.items():
        sources.add(ENGINE, value, name)
    caches = list(engine.caches())
    cached = {tensor_key(tensor) for _, tensor, _ in caches}
    seen: set[int] = set()
    holders: set[int] = set()
    for module_path, module in engine.modules.items():
        prefix = f"{module_path}." if module_path else ""
        for name, tensor in _parameters(module):
            _add_model_tensor(sources, tensor, prefix + name)
        for name, tensor in tensors_of(module, seen):
            if tensor_key(tensor) not in cached:
                _add_model_tensor(sources, tensor, prefix + name)
        _add_integers(sources, module, module_path, limits, MODEL_CONFIG, holders)
    for path, tensor, bases in caches:
        sources.add_tensor(tensor, _labelled(sources, tensor, bases, path))
    models = _names_and_values(engine.modules)
    for path, part in engine.machinery.items():
        for name, tensor in tensors_of(part, seen):
            known = _buffer_bases(sources, tensor)
            sources.add_tensor(tensor, _labelled(sources, tensor, known, f"{path}.{name}"))
        _add_integers(sources, part, path, limits, ENGINE, holders, models)
    return sources


def request_labels(num_tokens: int, num_reqs: int) -> dict[int, Label]:
    """Labels of the values that a traced step of these sizes brings.

    Metadata has one entry more than requests; all requests but one are decodes;
    the prefill is as long as they leave of the tokens, so both decide its length.
    """
    tokens = Label.of(NUM_TOKS, num_tokens)
    requests = Label.of(NUM_REQS, num_reqs)
    return {
        num_tokens - num_reqs + 1: tokens | requests,
        num_reqs - 1: Label.of(NUM_REQS, num_reqs - 1),
        num_reqs + 1: Label.of(NUM_REQS, num_reqs + 1),
        num_reqs: requests,
        num_tokens: tokens,
    }


def request_sources(num_tokens: int, num_reqs: int) -> set[Source]:
    """The values of `request_labels` as sources, to compare with the model's."""
    return {
        Source(base, value)
        for value, label in request_labels(num_tokens, num_reqs).items()
        for base in label.bases
    }


def tensor_key(tensor: torch.Tensor) -> TensorKey | None:
    """Address and sizes of a tensor; None where it has no memory of its own."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # fake and meta tensors have none
        return None
    return (address, tuple(tensor.size())) if address else None


# -- integers --------------------------------------------------------------------------------


def _add_integers(
    sources: Sources,
    owner: object,
    path: str,
    limits: Mapping[str, int],
    base: str,
    seen: set[int],
    models: frozenset[tuple[str, int]] = frozenset(),
) -> None:
    """Label the integers that `owner` holds, and the plain objects it holds.

    An integer named like a limit of the engine, and equal to it, is the
    engine's wherever it stands; one of the engine's objects that a module of
    the model has under the same name and value is the model's.
    """
    for slot in slots(owner, path, seen):

        def label(name: str, value: int, where: str = slot.path) -> Label:
            mine = base
            if limits.get(name) == value:
                mine = ENGINE
            elif (name, value) in models:
                mine = MODEL_CONFIG
            # An attribute may count layers or name a device: it is no size by its value alone.
            return sources.add(mine, value, where, is_size=False)

        labelled = slot.labelled(label)
        if labelled is not slot.value:
            sources._slots.append((slot.owner, slot.name, labelled))


def _names_and_values(modules: Mapping[str, Any]) -> frozenset[tuple[str, int]]:
    """Integer attributes of the model's modules and of the objects they hold."""
    found = set()
    seen: set[int] = set()
    for path, module in modules.items():
        for slot in slots(module, path, seen):
            if isinstance(slot.value, int):
                found.add((slot.name, int(slot.value)))
    return frozenset(found)


def _config_integers(value: Any, path: str) -> Iterator[tuple[str, int]]:
    """Integers of an HF configuration that can size something, with their paths."""
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            # Token ids and version numbers name things; they size nothing.
            if not str(name).endswith(("token_id", "_version")):
                yield from _config_integers(item, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _config_integers(item, f"{path}[{index}]")


# -- tensors ---------------------------------------------------------------------------------


def _parameters(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _add_model_tensor(sources: Sources, tensor: torch.Tensor, path: str) -> None:
    """A parameter, or a tensor that a module made of its own: every dimension is the model's."""
    sources.add_tensor(tensor, _labelled(sources, tensor, [MODEL_CONFIG] * tensor.dim(), path))


def _labelled(sources: Sources, tensor: torch.Tensor, bases: Iterable[str], path: str) -> Shape:
    return tuple(
        Dim(int(size), sources.add(base, int(size), f"{path}[{index}]"))
        for index, (size, base) in enumerate(zip(tensor.size(), bases, strict=True))
    )


def _buffer_bases(sources: Sources, tensor: torch.Tensor) -> list[str]:
    """Bases of an engine's buffer: its limits first, else a size that only the model has."""
    return [
        MODEL_CONFIG
        if Source(ENGINE, int(size)) not in sources.origins
        and Source(MODEL_CONFIG, int(size)) in sources.origins
        else ENGINE
        for size in tensor.size()
    ]
