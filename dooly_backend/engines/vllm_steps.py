"""Steps that vLLM did not schedule: SchedulerOutputs built for a batch that we name.

vLLM's own warm-up fabricates its requests the same way
(`vllm/v1/worker/gpu/warmup.py`). Seen to work unchanged on vLLM 0.25.1 and
0.32, V1 and V2 model runners.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from typing import Any

from dooly_backend.errors import EngineError
from dooly_backend.workload import Batch, Request


@dataclass(eq=False)
class LiveRequest:
    """A request that the runner knows, and how far it has come."""

    id: str
    computed: int  # tokens in the KV cache
    output_tokens: int = 0
    blocks: tuple[list[int], ...] = ()


@dataclass
class StepBuilder:
    """Builds SchedulerOutputs and hands out the KV blocks they need.

    `block_sizes` has one entry per KV-cache group (tokens per block);
    `num_blocks` is the size of the pool they share. Block 0 is vLLM's null
    block and never used. The lowest free blocks come first, so that equal batches
    hold equal blocks: recurrent layers pass the number of a request's block around.
    """

    block_sizes: tuple[int, ...]
    num_blocks: int
    vocab_size: int
    max_model_len: int
    _ids: Any = field(default_factory=count)
    _free: list[int] = field(default_factory=list)  # a heap
    _held: list[LiveRequest] = field(default_factory=list)
    _finished: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._free = list(range(1, self.num_blocks))

    def admit(self, batch: Batch, room: int = 0) -> Any:
        """A SchedulerOutput that starts every request of `batch`.

        `room` more tokens per request get KV blocks, for later `advance`s.
        Raises EngineError when the KV cache is too small.
        """
        from vllm.v1.core.sched.output import SchedulerOutput

        output = SchedulerOutput.make_empty()
        for request in as_served(batch.requests):
            live = self._start(request, room)
            output.scheduled_new_reqs.append(self._new_request(request, live))
            output.num_scheduled_tokens[live.id] = request.query
            live.computed += request.query
            live.output_tokens = 1
        return self._finish(output)

    def advance(self, requests: list[LiveRequest], fresh: Batch | None = None) -> Any:
        """A SchedulerOutput with one more token for `requests`, and new requests beside them."""
        output = self.admit(fresh) if fresh else None
        if output is None:
            from vllm.v1.core.sched.output import SchedulerOutput

            output = SchedulerOutput.make_empty()
        cached = output.scheduled_cached_reqs
        for live in requests:
            cached.req_ids.append(live.id)
            cached.new_block_ids.append(None)
            cached.num_computed_tokens.append(live.computed)
            cached.num_output_tokens.append(live.output_tokens)
            output.num_scheduled_tokens[live.id] = 1
            live.computed += 1
            live.output_tokens += 1
        return self._finish(output)

    def held(self) -> list[LiveRequest]:
        """The requests whose blocks are taken, oldest first."""
        return list(self._held)

    def release(self, requests: list[LiveRequest]) -> None:
        """Give back the blocks of `requests`; the next output tells the runner."""
        for live in requests:
            self._held.remove(live)
            self._finished.add(live.id)
            for blocks in live.blocks:
                for block in blocks:
                    heappush(self._free, block)

    def farewell(self) -> Any:
        """An empty SchedulerOutput that tells the runner which requests have finished."""
        from vllm.v1.core.sched.output import SchedulerOutput

        return self._finish(SchedulerOutput.make_empty())

    def _start(self, request: Request, room: int) -> LiveRequest:
        length = min(request.query + request.context + 1 + room, self.max_model_len)
        needed = [-(-length // size) for size in self.block_sizes]
        if sum(needed) > len(self._free):
            raise EngineError(
                f"the KV cache has {len(self._free)} free blocks and the batch needs more: "
                "measure smaller batches or give the engine more memory"
            )
        blocks = tuple([heappop(self._free) for _ in range(n)] for n in needed)
        live = LiveRequest(f"dooly-{next(self._ids)}", request.context, 0, blocks)
        self._held.append(live)
        return live

    def _new_request(self, request: Request, live: LiveRequest) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData

        # One token more than the step computes when the request is a decode:
        # the runner looks up the token at position `context`.
        length = request.query + request.context
        tokens = _tokens(length, self.vocab_size)
        return NewRequestData(
            req_id=live.id,
            prompt_token_ids=tokens,
            prefill_token_ids=tokens,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=1_000_000),
            pooling_params=None,
            block_ids=live.blocks,
            num_computed_tokens=request.context,
            lora_request=None,
        )

    def _finish(self, output: Any) -> Any:
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.num_common_prefix_blocks = [0] * len(self.block_sizes)
        output.finished_req_ids = output.finished_req_ids | self._finished
        self._finished.clear()
        return output


def as_served(requests: Sequence[Request]) -> list[Request]:
    """The requests with their decodes in an order that has nothing to do with their lengths.

    A server holds them as they came. Thread blocks start in that order, and those of a
    long request that starts last work alone at the end: the longest first, as a batch is
    written, is the quickest. Equal batches get equal orders.
    """
    places = [i for i, request in enumerate(requests) if request.is_decode]
    found = list(requests)
    mixed = random.Random(len(places)).sample(places, len(places))
    for place, other in zip(places, mixed, strict=True):
        found[place] = requests[other]
    return found


@lru_cache(maxsize=64)
def _tokens(length: int, vocab_size: int) -> list[int]:
    """A prompt. Any tokens do, but spread over the vocabulary: the embedding shall not find
    one row in the cache over and over. Runners copy it, so equal requests can share it.
    """
    return [(7 + 7919 * position) % vocab_size for position in range(length)]
