"""Step times of one latency model, sorted into LLMServingSim's layers.

All times are microseconds of one tensor-parallel rank. A layer's time is that
of one call as the simulator counts calls (layers * calls in a block, or one),
so that its own sum gives what all the operations behind the layer took.

Where whole steps were measured, layers over tokens and sequences are those of decode
steps of as many, padded and fused as their graph is. Where even a prefill of as many tokens
has no graph, the embedding also holds what launching takes longer than they do. What a step takes
more than that is in the rows of attention, which know what the step holds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cached_property

from dooly_backend.database.records import Occurrence
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.regression.whole_steps import StepRules, StepShape
from dooly_backend.simulation.execution import Mode
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
        self._tokens: dict[int, float] = {}
        self._waiting: dict[int, float] = {}
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

    @property
    def rules(self) -> StepRules:
        return self.model.step_rules

    def of_decodes(self, count: int) -> StepShape:
        """How a step of `count` decodes runs."""
        return self.rules.of(count, count, 1)

    def dense(self, layer: str, tokens: int) -> Cell:
        """One call of a layer over tokens; the sparse block is one of them."""
        shape = self.of_decodes(tokens)
        return self._call(layer, Batch.prefill(shape.tokens)).times(shape.share)

    def lm_head(self, sequences: int) -> Cell:
        return self._of_requests("lm_head", sequences)

    def sampler(self, sequences: int) -> Cell:
        """The sampler with everything that a step costs beyond its layers."""
        return self._of_requests("sampler", sequences) + self.step_cost(sequences)

    def step_cost(self, sequences: int) -> Cell:
        """The step's own cost, and operations that depend on nothing."""
        shape = self.of_decodes(sequences)
        operations = self.times.sum_of(self.of_home(STEP), Batch.prefill(1))
        return operations.times(shape.share).moved(shape.own_us)

    @cached_property
    def fixed_step_cost(self) -> float:
        """The part of it that does not depend on the requests."""
        one, two = (self.of_decodes(sequences).own_us for sequences in (1, 2))
        return self.step_cost(1).us - (two - one)

    def waiting(self, tokens: int) -> float:
        """What launching takes longer than layers over `tokens` and one sequence, without graph."""
        if tokens not in self._waiting:
            shape = self.rules.of(tokens, 1, tokens)
            us = 0.0
            if shape.mode == Mode.EAGER and shape.launch_us > 0:
                us = shape.launch_us - self._over_tokens(tokens) - self._over_sequences(1)
            self._waiting[tokens] = max(0.0, us)
        return self._waiting[tokens]

    def attention(self, chunk: int, history: int, size: int, context: int) -> Cell:
        """Attention of one layer: a prefill, equal decodes, or both."""
        return self._call(ATTENTION, attention_batch(chunk, history, size, context))

    def row_of_attention(self, chunk: int, size: int, attention: Cell) -> Cell:
        """A row of attention.csv: `attention`, and what the other layers lack of such a step."""
        if not self.rules.knows_whole_steps:
            return attention
        tokens, requests = chunk + size, bool(chunk) + size
        shape = self.rules.of(tokens, requests, chunk or 1)
        calls = self.calls(ATTENTION)
        whole_us = attention.us * calls
        others = self.times.sum_of(self._others, Batch.prefill(shape.tokens)).us
        others += self.times.sum_of(self._by_requests, Batch.decode(requests, 1)).us
        others += self._routed_more(tokens)
        step_us = shape.time_us(others + whole_us, whole_us)
        known = self._over_tokens(tokens) + self.waiting(tokens) + self._over_sequences(requests)
        return Cell(max(0.0, step_us - known) / calls, attention.source)

    def _over_tokens(self, tokens: int) -> float:
        """All layers over tokens of one step, attention aside."""
        if tokens not in self._tokens:
            layers = [n for n in self.architecture.dense_layers if n != MOE]
            us = sum(self.dense(name, tokens).us * self.calls(name) for name in layers)
            if self.of_home(MOE):
                us += self.routed(tokens).us * self.calls(MOE)
            self._tokens[tokens] = us
        return self._tokens[tokens]

    def _over_sequences(self, sequences: int) -> float:
        return self.lm_head(sequences).us + self.sampler(sequences).us

    @cached_property
    def _by_requests(self) -> list[Occurrence]:
        return [o for name in ("lm_head", "sampler") for o in self.of_home(name)]

    @cached_property
    def _others(self) -> list[Occurrence]:
        """What is neither attention, communication nor over requests."""
        left_out = {ATTENTION, COLLECTIVE, "lm_head", "sampler"}
        return [a.occurrence for a in self.assignments if a.home not in left_out]

    def _routed_more(self, tokens: int) -> float:
        """What the simulator's routing takes more than the database's, in one step."""
        if not self.knows_routing:
            return 0.0
        experts = self.times.sum_of(self.of_home(MOE), Batch.prefill(tokens)).us
        routed = (
            self.times.routed(o, tokens, self.routing.active(tokens)).us for o in self.of_home(MOE)
        )
        return sum(routed) - experts

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
        return total(cells).times(self.of_decodes(tokens).share / self.calls(MOE))

    def routed(self, tokens: int) -> Cell:
        """One call of it in a step of `tokens`, with the simulator's routing where it counts."""
        if self.knows_routing:
            return self.sparse(tokens, self.routing.active(tokens))
        return self.dense(MOE, tokens)

    def step_us(self, batch: Batch) -> float:
        """One step without collectives, with the simulator's routing where it was measured."""
        shape = self.rules.of_batch(batch)
        operations_us, whole_us = self.times.operations_us(batch, shape.tokens)
        collectives_us = self.collectives_us(Batch.prefill(shape.tokens))
        operations_us += self._routed_more(batch.num_tokens) - collectives_us
        return shape.time_us(operations_us, whole_us - collectives_us)

    def collectives_us(self, batch: Batch) -> float:
        """Of one step: what the tables leave to the network simulator."""
        return self.times.sum_of(self.of_home(COLLECTIVE), batch).us

    def _of_requests(self, layer: str, sequences: int) -> Cell:
        return self._call(layer, Batch.decode(sequences, 1)).times(self.of_decodes(sequences).share)

    def _call(self, layer: str, batch: Batch) -> Cell:
        occurrences = self.of_home(layer)
        if not occurrences:
            return ZERO
        return self.times.sum_of(occurrences, batch).times(1 / self.calls(layer))


def attention_batch(chunk: int, history: int, size: int, context: int) -> Batch:
    """The batch of a row of attention.csv."""
    prefill = (Request(chunk, history),) if chunk else ()
    return Batch(prefill + (Request(1, context),) * size)
