"""How an engine runs a step, and what one of many equal steps then takes: of one batch at a time.

A `LatencyModel` adds up operations; an engine at its defaults pads them, fuses some and replays
graphs, and on a GPU a step lasts as long as the slower of device and host. What was
fitted to whole steps (`stream_cost.py`) says by how much. `simulation/step_time.py` works out the
same for many batches at once, beside what a scheduler adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dooly_backend.database.records import Configuration, PartCost, Signature, StepCost
from dooly_backend.errors import InputError
from dooly_backend.simulation.execution import (
    GRAPH_MODES,
    OF_CONFIGURATION,
    Execution,
    Mode,
    capture_sizes,
)
from dooly_backend.simulation.own_cost import MODE_NAMES, ModeCost, StreamedCost, own_cost
from dooly_backend.workload import Batch, PointKind

#: What a step's padding changes: graphs run operations over tokens at a captured size.
OVER_TOKENS: tuple[PointKind, ...] = ("tokens", "routing", "constant")


@dataclass(frozen=True)
class StepShape:
    """One step as it is run. Times are microseconds.

    `tokens` are those with padding, which its operations over tokens see. Beside attention
    and collectives it takes `share` of its operations, and `own_us`; the host launches
    for `launch_us`.
    """

    tokens: int
    own_us: float
    share: float = 1.0
    launch_us: float = 0.0
    mode: Mode = Mode.EAGER

    def time_us(self, operations_us: float, whole_us: float) -> float:
        """What it takes among its like: `operations_us` in all, of which `whole_us` never shrinks.

        The latter is of attention and collectives, which no compiler fuses with others.
        """
        device_us = whole_us + self.share * (operations_us - whole_us) + self.own_us
        return max(device_us, self.launch_us)


class StepRules:
    """The shapes of one configuration's steps."""

    def __init__(
        self,
        configuration: Configuration,
        step_cost: StepCost | None = None,
        stream: Sequence[PartCost] = (),
        engine_version: str = "",
    ) -> None:
        """Raises InputError for a profile of whole steps that lacks the engine's limits."""
        self._layers = configuration.layers_run
        self._step_cost = step_cost
        self._streamed: StreamedCost | None = None
        cost = own_cost(None, self._layers, stream)
        if isinstance(cost, StreamedCost):
            self._streamed = cost
            self._execution = execution_of(configuration, engine_version)

    @property
    def knows_whole_steps(self) -> bool:
        """Whether steps were measured as the engine runs them by default."""
        return self._streamed is not None

    @property
    def knows_own_cost(self) -> bool:
        """Whether it is known what a step takes beyond its operations."""
        return self._streamed is not None or self._step_cost is not None

    def of_batch(self, batch: Batch) -> StepShape:
        longest = max(request.query for request in batch.requests)
        return self.of(batch.num_tokens, batch.num_reqs, longest)

    def of(self, tokens: int, requests: int, longest: int) -> StepShape:
        """The shape of a step by its new tokens, its requests and its longest one's new tokens."""
        if self._streamed is None:
            own = self._step_cost
            return StepShape(tokens, own.time_us(self._layers, requests) if own else 0.0)
        numbers = (np.array([number]) for number in (tokens, requests, longest))
        modes, padded = self._execution.modes(*numbers)
        mode = Mode(modes[0])
        cost = self._streamed.modes[mode]
        return StepShape(int(padded[0]), cost.gap_us, cost.share, _launch_us(cost, requests), mode)

    def described(self) -> dict[str, Any] | None:
        """The rules as JSON, for who predicts without Dooly; None where no whole step was measured.

        Modes are named as in a configuration's parts of a step (`PartCost`): "eager", "piecewise",
        "full". A step of one new token per request runs as `of_decodes` says, if its tokens fit
        into a size of at most `max_num_seqs`; any other as `of_others`, if they fit into any, and
        padded to that; what fits into none runs eagerly. Microseconds.
        """
        if self._streamed is None:
            return None
        of_decodes, of_others = GRAPH_MODES[self._execution.graphs]
        return {
            "sizes": list(self._execution.sizes),
            "max_num_seqs": self._execution.max_num_seqs,
            "of_decodes": MODE_NAMES[of_decodes],
            "of_others": MODE_NAMES[of_others],
            "modes": {
                MODE_NAMES[mode]: {
                    "share": cost.share,
                    "own_us": cost.gap_us,
                    "launch_us": _launch_us(cost, 0),
                    "launch_request_us": _launch_us(cost, 1) - _launch_us(cost, 0),
                }
                for mode, cost in self._streamed.modes.items()
            },
        }


def is_whole(signature: Signature) -> bool:
    """Whether a step takes all of it, whatever the compiler fuses: attention and collectives."""
    return signature.is_attention or signature.is_collective


def execution_of(configuration: Configuration, engine_version: str) -> Execution:
    """How the engine that was profiled runs its steps. Raises InputError where it did not say."""
    graphs = OF_CONFIGURATION[configuration.execution_mode]
    if graphs == "NONE":
        return Execution()
    names = "max_num_seqs", "max_num_batched_tokens"
    limits = [configuration.facts.get(name) for name in names]
    if None in limits:
        raise InputError(
            f"the profile of {configuration.model} does not say its {' and '.join(names)}, which "
            "decide the sizes of CUDA graphs: profile it again"
        )
    requests, tokens = (int(limit) for limit in limits if limit is not None)
    return Execution(graphs, capture_sizes(requests, tokens, engine_version), requests)


def _launch_us(cost: ModeCost, requests: int) -> float:
    """Before the device begins, and while it works."""
    parts = cost.host, cost.launch
    return sum(part.step_us + part.request_us * requests for part in parts)
