"""What Dooly needs of a serving engine, whichever it is.

An engine holds one instance of the model with few layers and dummy weights.
It runs *injected* steps: the caller names the batch, the engine's own code
prepares inputs, metadata and KV-cache blocks for it (paper section 5.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from dooly_backend.database.records import Configuration, Environment, KvCapacity
from dooly_backend.engines.environment import device_identity
from dooly_backend.workload import Batch


@dataclass(frozen=True)
class CapturedCall:
    """One call during a step, with all that repeating it needs.

    `target` is a module, or an operation that ran in the module at `path`;
    then `ordinal` counts the operations of that module's call, from 0.
    `context` is the engine's forward context of the step (KV cache, attention
    metadata), valid until the capture it belongs to is closed. `moment` orders
    the calls of a step.
    """

    path: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    context: Any
    moment: int
    ordinal: int | None = None

    def __call__(self) -> Any:
        """Run it again; the caller provides `Engine.running`."""
        return self.target(*self.args, **self.kwargs)


@dataclass(frozen=True)
class MoeLayer:
    """A mixture-of-experts layer of one rank: `experts` it owns, from global id `first` on."""

    experts: int
    top_k: int
    first: int = 0


@dataclass(frozen=True)
class PipelinedStep:
    """One of many steps in a row, microseconds.

    `interval_us` from the moment when the tokens of the step before were out to
    the moment when this one's were; `launch_us` is what the host needed to
    prepare and launch it. `begin_us` and `device_us` are the device's own: when it
    began, since the first of these steps, and how long it was at it. None without
    an accelerator.
    """

    interval_us: float
    launch_us: float
    begin_us: float | None = None
    device_us: float | None = None


#: How tokens are routed: exactly so many experts fire, or experts drawn at random.
Routing = int | Literal["uniform"]


class Engine(ABC):
    """A booted model. Not thread-safe: one step at a time."""

    configuration: Configuration
    environment: Environment
    #: Kind of every layer of the full model, in order; equal kinds, equal layers.
    layer_kinds: tuple[str, ...]
    #: Layers of the full model that this rank runs: all, or those of its pipeline stage.
    stage: range
    #: Layers of this instance: the first ones of `stage`.
    num_layers: int
    max_model_len: int
    #: Tokens that a request may have once a step is done; room for a sampled one is left.
    max_request_len: int
    max_num_tokens: int
    max_num_reqs: int
    vocab_size: int
    #: Seconds that starting it took, its import included; None where nobody looked.
    boot_s: float | None = None

    @property
    @abstractmethod
    def modules(self) -> Mapping[str, Any]:
        """Every module of a step by path: the model's, and the sampler as "sampler"."""

    @abstractmethod
    def module(self, path: str) -> Any:
        """The module at a path of a trace; shared modules answer under every caller's path."""

    @property
    @abstractmethod
    def stateful(self) -> frozenset[str]:
        """Paths of the modules that the engine's own registry binds to request state."""

    @property
    @abstractmethod
    def operation_bodies(self) -> Mapping[str, Callable[..., Any]]:
        """Python bodies of the engine's custom operations, by qualified name."""

    @abstractmethod
    def kernel_identity(self) -> dict[str, Any]:
        """What selects kernels on this device: CPU capability, library, ISA."""

    @property
    @abstractmethod
    def limits(self) -> Mapping[str, int]:
        """The engine's own limits by name: what it sizes its buffers by, and no model decides."""

    @abstractmethod
    def caches(self) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
        """KV caches: path, tensor, and what sizes each dimension.

        That is "engine" (its blocks), "model_config", or "literal" (keys beside values).
        """

    @property
    def machinery(self) -> Mapping[str, Any]:
        """Objects beside the model that prepare a step: they hold buffers of the engine."""
        return {}

    @abstractmethod
    def stateful_identity(self, path: str) -> dict[str, Any]:
        """What of the engine selects the kernels of a stateful module, beside its attributes."""

    @property
    def device(self) -> str:
        """The physical device, as no other of this host is called: one lock each for timing."""
        return device_identity()

    @property
    def graphs(self) -> Mapping[str, Any]:
        """The CUDA graphs that steps replay: `cudagraph_mode` and `cudagraph_capture_sizes`.

        Empty where every step is launched operation by operation.
        """
        return {}

    @property
    def moe(self) -> Mapping[str, MoeLayer]:
        """The mixture-of-experts layers by path; none for a dense model."""
        return {}

    def routed(self, how: Routing | None) -> AbstractContextManager[None]:
        """Route every MoE layer as `how` says while the `with` block runs; None leaves it be."""
        return nullcontext()

    def kv_capacity(self) -> KvCapacity | None:
        """What decides how many KV blocks the full model has; None where it cannot be told."""
        return None

    @abstractmethod
    def step(self, batch: Batch) -> None:
        """Run one whole step for `batch`. Raises EngineError if it does not fit."""

    @abstractmethod
    def capture(
        self, batch: Batch, paths: Collection[str]
    ) -> AbstractContextManager[list[CapturedCall]]:
        """Run `batch` and yield the `CapturedCall`s of `paths`, in order.

        Inside the `with`, the calls can be repeated with `call`; the requests
        hold their KV blocks until it ends.
        """

    @abstractmethod
    def running(self, context: Any) -> AbstractContextManager[None]:
        """The conditions of a step (inference mode, `context` as forward context)."""

    def call(self, call: CapturedCall) -> Any:
        """Run `call` again, under the context it had."""
        with self.running(call.context):
            return call()

    @abstractmethod
    def live_steps(
        self,
        batch: Batch,
        repeats: int,
        run: Callable[[Callable[[], None]], None],
        layers: int | None = None,
    ) -> None:
        """Hand `repeats` whole steps like `batch` to `run`, which calls and times each.

        Decodes continue from step to step as they do when serving; prefills
        are new requests each time. `layers` runs only the first of them. One
        more step is run ahead, to warm up.
        """

    def pipelined_steps(self, batch: Batch, repeats: int) -> list[PipelinedStep]:
        """Run `repeats` steps like `batch` as asynchronous scheduling does.

        Each is launched before the tokens of the one before it are waited for. Two
        more run ahead, to warm up and to fill the pipeline.
        """
        decodes = Batch(batch.decodes) if batch.decodes else None
        prefills = Batch(batch.prefills) if batch.prefills else None
        return self.pipelined_sequence(decodes, [prefills] * repeats)

    @abstractmethod
    def pipelined_sequence(
        self, decodes: Batch | None, prefills: Sequence[Batch | None]
    ) -> list[PipelinedStep]:
        """As `pipelined_steps`, with other prefills in every step.

        `decodes` continue from step to step; `prefills` are new requests of each
        step, one entry a step. Two more steps, like the first, run ahead. Raises
        EngineError where a step does not fit.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished everything."""

    @abstractmethod
    def close(self) -> None:
        """Release the engine's processes, groups and memory."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def hooks(handles: Sequence[Any]) -> Iterator[None]:
    """Remove torch hook handles at the end, whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def once(tensor: Any) -> Any:
    """A view of `tensor` without the repetitions that expanding it made."""
    keep = (slice(1) if stride == 0 else slice(None) for stride in tensor.stride())
    return tensor[tuple(keep)]


def copied(value: Any) -> Any:
    """`value` with every tensor in it copied, strides kept.

    Parameters stay as they are, since no step writes them.

    `Tensor.clone` would make a slice of the QKV projection contiguous, and a
    kernel may choose its path by the strides.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_map_only

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter):
            return tensor
        twin = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        # Elements that an expanded tensor repeats are one in memory: copied once.
        once(twin).copy_(once(tensor))
        return twin

    # Copying is no operation of the step: a recording mode must not count it.
    with _disable_current_modes():
        return tree_map_only(torch.Tensor, copy, value)
