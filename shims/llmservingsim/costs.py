"""Step times of one latency model, sorted into LLMServingSim's layers.

All times are microseconds of one tensor-parallel rank. A layer's time is that
of one call as the simulator counts calls (layers * calls in a block, or one),
so that its own sum gives what all the operations behind the layer took.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cached_property

from dooly_backend.database.records import Occurrence
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch, Request

from ..times import ZERO, CallTimes, Cell, total
from .architecture import Architecture
from .mapping import ATTENTION, CALLS_PER_BLOCK, COLLECTIVE, MOE, ONCE, STEP, Assignment, assign
from .routing import Routing


class LayerCosts:
    """`model` seen as the simulator's layers."""

    def __init__(self, model: LatencyModel, architecture: Architecture) -> None:
        self.model = model
        self.architecture = architecture
        self.times = CallTimes(model)
        self.assignments: tuple[Assignment, ...] = assign(model.occurrences, architecture.layers)
        self._homes: dict[str, list[Occurrence]] = defaultdict(list)
        for assignment in self.assignments:
            self._homes[assignment.home].append(assignment.occurrence)

    @property
    def degree(self) -> int:
        return self.model.configuration.tensor_parallel

    @property
    def layers(self) -> int:
        return self.model.configuration.num_layers

    def of_home(self, home: str) -> list[Occurrence]:
        return self._homes.get(home, [])

    def calls(self, layer: str) -> int:
        """How often one step looks `layer` up."""
        return 1 if layer in ONCE else self.layers * CALLS_PER_BLOCK.get(layer, 1)

    def dense(self, layer: str, tokens: int) -> Cell:
        """One call of a layer over tokens; the sparse block is one of them."""
        return self._call(layer, Batch.prefill(tokens))

    def lm_head(self, sequences: int) -> Cell:
        return self._call("lm_head", Batch.decode(sequences, 1))

    def sampler(self, sequences: int) -> Cell:
        """The sampler with everything that a step costs beyond its layers."""
        return self._call("sampler", Batch.decode(sequences, 1)) + self.step_cost(sequences)

    def step_cost(self, sequences: int) -> Cell:
        """The step's own cost, and operations that depend on nothing."""
        own = self.model.step_cost
        constant = own.time_us(self.layers, sequences) if own else 0.0
        return self.times.sum_of(self.of_home(STEP), Batch.prefill(1)).moved(constant)

    @cached_property
    def fixed_step_cost(self) -> float:
        """The part of it that does not depend on the requests."""
        own = self.model.step_cost
        return self.step_cost(1).us - (own.request_us if own else 0.0)

    def attention(self, chunk: int, history: int, size: int, context: int) -> Cell:
        """Attention of one layer: a prefill, equal decodes, or both."""
        return self._call(ATTENTION, attention_batch(chunk, history, size, context))

    @property
    def knows_routing(self) -> bool:
        """Whether its sparse block was measured by the experts that fire, not by tokens alone."""
        return any(o.signature.kind == "routing" for o in self.of_home(MOE))

    @property
    def routing(self) -> Routing:
        """The simulator's, over ranks that own as many experts as the measured one did."""
        experts, each = self.architecture.experts, self.architecture.experts_per_token
        owned = min(
            int(json.loads(o.signature.canonical)["routing"]["experts"])
            for o in self.of_home(MOE)
            if o.signature.kind == "routing"
        )
        return Routing(experts, min(each, experts), max(1, experts // owned))

    def sparse(self, tokens: int, active: int) -> Cell:
        """One call of the sparse block where `active` distinct experts fire."""
        cells = (self.times.routed(o, tokens, active) for o in self.of_home(MOE))
        return total(cells).times(1 / self.calls(MOE))

    def routed(self, tokens: int) -> Cell:
        """One call of it in a step of `tokens`, with the simulator's routing where it counts."""
        if self.knows_routing:
            return self.sparse(tokens, self.routing.active(tokens))
        return self.dense(MOE, tokens)

    def step_us(self, batch: Batch) -> float:
        """One step without collectives, with the simulator's routing where it was measured."""
        us = self.times.step_us(batch) - self.collectives_us(batch)
        if self.knows_routing:
            tokens = batch.num_tokens
            changed = self.routed(tokens).us - self.dense(MOE, tokens).us
            us += changed * self.calls(MOE)
        return us

    def collectives_us(self, batch: Batch) -> float:
        """Of one step: what the tables leave to the network simulator."""
        return self.times.sum_of(self.of_home(COLLECTIVE), batch).us

    def _call(self, layer: str, batch: Batch) -> Cell:
        occurrences = self.of_home(layer)
        if not occurrences:
            return ZERO
        return self.times.sum_of(occurrences, batch).times(1 / self.calls(layer))


def attention_batch(chunk: int, history: int, size: int, context: int) -> Batch:
    """The batch of a row of attention.csv."""
    prefill = (Request(chunk, history),) if chunk else ()
    return Batch(prefill + (Request(1, context),) * size)
