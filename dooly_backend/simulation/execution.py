"""How the engine runs a step: as a whole CUDA graph, in pieces, or op by op; and padded to what.

The rules are vLLM's, the same in 0.25.1 and 0.32 but for one captured size:

- `VllmConfig._set_cudagraph_sizes` chooses the captured sizes
  (`vllm/config/vllm.py`, 0.25.1 lines 1713-1776; 0.32 lines 2340-2500, which
  adds `max_num_seqs` itself);
- a *uniform decode* batch has one token per request (`_is_uniform_decode`,
  `vllm/v1/worker/gpu_model_runner.py`, 0.32 line 3654; V2 runner:
  `get_uniform_token_count`, `vllm/v1/worker/gpu/cudagraph_utils.py`, 0.25.1 line 96);
- it replays the FULL graph of the next captured size of at most `max_num_seqs`;
  anything else the PIECEWISE graph of the next captured size; what is larger
  than the largest captured size runs without a graph and without padding
  (`CudagraphDispatcher.dispatch`, `vllm/v1/cudagraph_dispatcher.py`, the same in
  both; `CudaGraphManager.dispatch`, 0.25.1 line 371, 0.32 line 518).

Speculative decoding, LoRA and microbatching, which add graphs, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dooly_backend.errors import InputError
from dooly_backend.simulation.records import Integers

_LARGEST = 512  # tokens: vLLM captures no more by itself (1024 on data-centre Blackwell)


class Mode(IntEnum):
    """How one step runs."""

    EAGER = 0
    PIECEWISE = 1
    FULL = 2


#: Modes of vLLM's `CUDAGraphMode`: of a uniform decode batch, and of any other.
GRAPH_MODES = {
    "NONE": (Mode.EAGER, Mode.EAGER),
    "PIECEWISE": (Mode.PIECEWISE, Mode.PIECEWISE),
    "FULL": (Mode.FULL, Mode.FULL),
    "FULL_DECODE_ONLY": (Mode.FULL, Mode.EAGER),
    "FULL_AND_PIECEWISE": (Mode.FULL, Mode.PIECEWISE),
}
#: What the execution mode of a configuration means to vLLM; the last is its default.
OF_CONFIGURATION = {"eager": "NONE", "piecewise": "PIECEWISE", "full_graph": "FULL_AND_PIECEWISE"}


def capture_sizes(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    engine_version: str = "0.32.0",
    largest: int = _LARGEST,
) -> tuple[int, ...]:
    """The numbers of tokens that vLLM captures graphs for by default, ascending."""
    most = min(max_num_batched_tokens, max_num_seqs * 2, largest)
    sizes = {size for size in (1, 2, 4) if size <= most}
    sizes.update(range(8, min(most + 1, 256), 8))
    sizes.update(range(256, most + 1, 16))
    if max_num_batched_tokens <= most:
        sizes.add(max_num_batched_tokens)
    # Since when is not known: 0.25.1 does not capture it, 0.32 does.
    if _version(engine_version) >= (0, 32) and max_num_seqs <= most:
        sizes.add(max_num_seqs)
    return tuple(sorted(sizes))


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = (*text.split("."), "0")
    return int(major), int(minor)


@dataclass(frozen=True)
class Execution:
    """The rule of one engine: its graph mode, what it captured, and how many requests it takes."""

    graphs: str = "NONE"  # a name of GRAPH_MODES
    sizes: Sequence[int] = ()
    max_num_seqs: int = 0

    def __post_init__(self) -> None:
        if self.graphs not in GRAPH_MODES:
            raise InputError(f"no CUDA graph mode {self.graphs!r}: use {', '.join(GRAPH_MODES)}")
        if self.graphs != "NONE" and not self.sizes:
            raise InputError(f"the mode {self.graphs} needs the sizes that were captured")

    @classmethod
    def served(cls, about: Mapping[str, Any], max_num_seqs: int) -> Execution:
        """The rule of a live server, as it told itself (`Run.about`)."""
        graphs, sizes = about.get("cudagraph_mode"), about.get("cudagraph_capture_sizes")
        return cls(graphs, tuple(sizes), max_num_seqs) if graphs and sizes else cls()

    def modes(
        self, tokens: Integers, requests: Integers, longest: Integers
    ) -> tuple[npt.NDArray[np.int8], Integers]:
        """The mode of each step, and its tokens with padding.

        `tokens` and `requests` are the step's, `longest` the most new tokens of
        one of its requests; one entry per step.
        """
        if self.graphs == "NONE":
            return np.full(len(tokens), Mode.EAGER, np.int8), tokens
        of_decode, of_mixed = GRAPH_MODES[self.graphs]
        uniform = (longest == 1) & (tokens == requests)
        padded, inside = _padded(tokens, self._sizes)
        mode = np.where(inside, np.int8(of_mixed), np.int8(Mode.EAGER))
        sizes_of_decode = self._sizes[self._sizes <= self.max_num_seqs]
        _, fits = _padded(tokens, sizes_of_decode)
        if of_decode != of_mixed:
            mode = np.where(uniform & fits, np.int8(of_decode), mode)
        return mode, np.where(mode == Mode.EAGER, tokens, padded)

    @cached_property
    def _sizes(self) -> Integers:
        return np.array(sorted(self.sizes), np.int64)


def _padded(tokens: Integers, sizes: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """The next of `sizes` (the number itself where there is none), and whether there is one."""
    if not len(sizes):
        return tokens, np.zeros(len(tokens), bool)
    at = np.searchsorted(sizes, tokens)
    inside = at < len(sizes)
    return np.where(inside, sizes[np.minimum(at, len(sizes) - 1)], tokens), inside
