"""The vLLM adapter: boot through EngineCore, inject steps, capture contexts.

Works with vLLM 0.32 (CPU) and 0.25.1 (CUDA), V1 and V2 model runners, through
what they share: EngineCore, the runner's `execute_model` and `sample_tokens`,
SchedulerOutput, and the forward context.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

from dooly_backend.config import RunOptions
from dooly_backend.engines.base import CapturedCall, PipelinedStep, copied, hooks
from dooly_backend.engines.device_marks import marker
from dooly_backend.engines.paths import ModuleStack
from dooly_backend.engines.vllm_instance import VllmInstance
from dooly_backend.engines.vllm_start import start
from dooly_backend.engines.vllm_steps import LiveRequest
from dooly_backend.errors import EngineError
from dooly_backend.workload import Batch, Request


class VllmEngine(VllmInstance):
    """One vLLM EngineCore in this process, with dummy weights and few layers."""

    @classmethod
    def boot(
        cls, options: RunOptions, before_device: Callable[[], object] = lambda: None
    ) -> VllmEngine:
        """Start vLLM with dummy weights. Raises what `vllm_start.start` raises."""
        started = start(options, before_device)
        with started.undo as undo:
            engine = cls(started, options)
            engine._undo = undo.pop_all()
        return engine

    def step(self, batch: Batch) -> None:
        with self._admitted(batch):
            self.synchronize()

    @contextmanager
    def capture(self, batch: Batch, paths: Collection[str]) -> Iterator[list[CapturedCall]]:
        from vllm.forward_context import get_forward_context, is_forward_context_available

        wanted = frozenset(paths)
        calls: list[CapturedCall] = []
        stack = ModuleStack(self.modules)

        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if stack.path in wanted:
                context = get_forward_context() if is_forward_context_available() else None
                calls.append(
                    CapturedCall(
                        stack.path,
                        module,
                        copied(args),
                        copied(kwargs),
                        context,
                        time.perf_counter_ns(),
                    )
                )

        modules = {id(module): module for module in self.modules.values()}
        handles = [
            module.register_forward_pre_hook(record, with_kwargs=True)
            for module in modules.values()
        ]
        with ExitStack() as exit_stack:
            with hooks(handles), stack.tracking():
                exit_stack.enter_context(self._admitted(batch))
            self.synchronize()
            yield calls

    @contextmanager
    def running(self, context: Any) -> Iterator[None]:
        import torch
        from vllm.forward_context import override_forward_context

        with torch.inference_mode(), override_forward_context(context):
            yield

    def live_steps(
        self,
        batch: Batch,
        repeats: int,
        run: Callable[[Callable[[], None]], None],
        layers: int | None = None,
    ) -> None:
        decodes = Batch(batch.decodes) if batch.decodes else None
        prefills = Batch(batch.prefills) if batch.prefills else None
        last = tuple(Request(1, r.context + repeats + 1) for r in batch.decodes)
        self._check_fits(Batch(batch.prefills + last))
        with self._limited(layers):
            running: list[LiveRequest] = []
            try:
                if decodes:
                    self._execute(self._steps.admit(decodes, room=repeats + 2))
                    running = self._steps.held()
                for turn in range(repeats + 1):
                    step = partial(self._execute, self._steps.advance(running, prefills))
                    self.synchronize()
                    if turn:
                        run(step)
                    else:
                        step()
                    self._steps.release([r for r in self._steps.held() if r not in running])
            finally:
                self._steps.release(self._steps.held())
                self._runner.execute_model(self._steps.farewell())

    def pipelined_sequence(
        self, decodes: Batch | None, prefills: Sequence[Batch | None]
    ) -> list[PipelinedStep]:
        several = [prefills[0], prefills[0], *prefills]
        grown = (
            Batch(tuple(Request(1, r.context + len(several)) for r in decodes.requests))
            if decodes
            else None
        )
        for fresh in set(several):
            parts = [part for part in (grown, fresh) if part]
            if not parts:
                raise EngineError("a step of nothing: give it decodes or prefills")
            self._check_fits(sum(parts[1:], parts[0]))
        marks = marker()
        launched: list[tuple[float, Any]] = []  # what the launch took, and the promise
        done: list[tuple[float, int]] = []  # what the launch took, and when the tokens were out
        try:
            if decodes:
                self._execute(self._steps.admit(decodes, room=len(several) + 2))
            running = self._steps.held()
            for fresh in several:
                output = self._steps.advance(running, fresh)
                # Requests finish in the order in which they came: the prefills are the last.
                self._steps.release(self._steps.held()[len(running) :])
                start = time.perf_counter_ns()
                with marks.step():
                    promise = self._launch(output)
                launched.append(((time.perf_counter_ns() - start) / 1000, promise))
                # An asynchronous runner has one more step under way; another's tokens are out.
                while len(launched) > hasattr(promise, "get_output"):
                    done.append(_received(*launched.pop(0)))
            done += [_received(*step) for step in launched]
        finally:
            self._steps.release(self._steps.held())
            self._runner.execute_model(self._steps.farewell())
            self.synchronize()
        return [
            PipelinedStep((out - before) / 1000, launch, *mark)
            for ((_, before), (launch, out)), mark in zip(
                pairwise(done[1:]), marks.since(2), strict=True
            )
        ]

    def synchronize(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @contextmanager
    def _admitted(self, batch: Batch) -> Iterator[None]:
        """Run one step of `batch`; its requests finish when the block ends."""
        self._check_fits(batch)
        try:
            self._execute(self._steps.admit(batch))
            yield
        finally:
            self._steps.release(self._steps.held())
            self._runner.execute_model(self._steps.farewell())

    def _execute(self, scheduler_output: Any) -> None:
        _received(0.0, self._launch(scheduler_output))

    def _launch(self, scheduler_output: Any) -> Any:
        """Launch one step; what it returns may be a promise (asynchronous runners)."""
        from dooly_backend.engines.parallel_vllm import received, sent

        # The worker does this around the runner, with the pipeline's neighbours.
        incoming = received(self._runner, scheduler_output.total_num_scheduled_tokens)
        output = self._runner.execute_model(scheduler_output, incoming)
        if sent(output):
            output = None
        if output is None:
            output = self._runner.sample_tokens(None)
        return output

    def _check_fits(self, batch: Batch) -> None:
        limits = [
            (batch.num_tokens, self.max_num_tokens, "tokens a step"),
            (batch.num_reqs, self.max_num_reqs, "requests a step"),
            (batch.longest, self.max_request_len, "tokens a request"),
        ]
        for value, limit, what in limits:
            if value > limit:
                raise EngineError(f"batch {batch.key} has {value} {what}, the engine takes {limit}")

    @contextmanager
    def _limited(self, layers: int | None) -> Iterator[None]:
        """Run only the first `layers` layers: vLLM's models loop from start_layer to end_layer."""
        if layers is None or layers == self.num_layers:
            yield
            return
        owners = [
            module
            for module in self._runner.model.modules()
            if hasattr(module, "end_layer") and hasattr(module, "layers")
        ]
        if len(owners) != 1:
            raise EngineError("this model cannot be run with fewer layers: it has no end_layer")
        owner, whole = owners[0], owners[0].end_layer
        owner.end_layer = owner.start_layer + layers
        try:
            yield
        finally:
            owner.end_layer = whole


def _received(launch_us: float, output: Any) -> tuple[float, int]:
    """Wait for a step's tokens: what its launch took, and when they were out (ns)."""
    if hasattr(output, "get_output"):
        output.get_output()
    return launch_us, time.perf_counter_ns()
