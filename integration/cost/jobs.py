"""The configurations of a corpus, in the order in which an interrupted run is worth most.

Model by model, all backends of one next to each other: they share everything but
attention, and a model is a row of the tables only with all of them. Models that
bring most that is new come first. What the corpus shares is measured then after a
few of them, and a run that is stopped has only left out what costs little more than
starting an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dooly_backend.config import load_model
from dooly_backend.database import Database
from dooly_backend.engines.kv_cache import GIB, kv_cache_bytes
from dooly_backend.errors import InputError
from dooly_backend.sweeps import AdaptiveSweep, Grid, described
from integration.corpus.corpora import Case
from integration.gpu.run import AUTO

BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
#: Models that vLLM serves with a backend of their own kind: its choice is the only one.
ONE_BACKEND = ("deepseek-ai/DeepSeek-V2-Lite",)
#: Beside weights and KV cache: contexts, workspaces, the largest step's activations. The one
#: engine whose turn it is takes more, for which `waves` leaves room.
_OTHER_BYTES = 3 * GIB
_WIDTH = 2  # bytes of a bfloat16


@dataclass(frozen=True)
class Job:
    """One configuration to profile: `model` is what ``dooly profile`` takes."""

    model: str
    backend: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.model}:{self.backend}:{self.mode}"

    def is_done(self, database: Database, sweep: Grid | AdaptiveSweep) -> bool:
        """Whether a run in `database` has finished `sweep`."""
        wanted = load_model(self.model).name, self.mode, "none"
        for i, known in database.configurations().items():
            if (known.model, known.execution_mode, known.quantization) != wanted:
                continue
            if self.backend not in (AUTO, known.backend):
                continue
            runs = (run for e in database.environments() for run in database.runs(i, e))
            if any(is_complete(run.facts, sweep) for run in runs):
                return True
        return False

    def device_bytes(self, layers: int) -> int:
        """Memory that its engine takes on a GPU, at most."""
        config = load_model(self.model).hf_config
        return weight_bytes(config, layers) + kv_cache_bytes(config, layers, True) + _OTHER_BYTES


def is_complete(facts: Mapping[str, Any], sweep: Grid | AdaptiveSweep) -> bool:
    """Whether the run of these facts ended with `sweep` known, and not with another of its name."""
    return bool(facts.get("complete")) and facts.get("sweep") == described(sweep)


def jobs_of(
    cases: Iterable[Case], backends: Sequence[str], mode: str, folder: Path | None = None
) -> list[Job]:
    """A job for every model and backend; `folder` has other configs under the models' names.

    Raises InputError for a case that is one rank of a group: engines here have one GPU each.
    """
    cases = list(cases)
    ranks = [case.name for case in cases if case.settings]
    if ranks:
        raise InputError(f"{', '.join(ranks)}: one rank of several is not run here; leave them out")
    return [
        Job(str(folder / case.name) if folder else case.model, backend, mode)
        for case in cases
        for backend in ((AUTO,) if case.model in ONE_BACKEND else backends)
    ]


def newest_first(cases: Sequence[Case], results: Mapping[str, Mapping[str, Any]]) -> list[Case]:
    """Next, time and again, the case that adds most points to those before it.

    `results` are those of `integration.corpus`; a case without one comes last.
    """
    known: set[str] = set()
    left, ordered = list(cases), []

    def new_points(case: Case) -> int:
        found = results.get(case.name, {}).get("operation_signatures", {})
        return sum(value["points"] for digest, value in found.items() if digest not in known)

    while left:
        best = max(left, key=new_points)  # of equal ones the first
        left.remove(best)
        ordered.append(best)
        known |= set(results.get(best.name, {}).get("operation_signatures", {}))
    return ordered


def weight_bytes(config: Mapping[str, Any], layers: int) -> int:
    """Bytes of the weights of `layers` layers and both embeddings, in two bytes, at most."""

    def of(*names: str) -> int:
        return next((int(config[name]) for name in names if config.get(name)), 0)

    width = of("hidden_size")
    experts = of("num_experts", "num_local_experts", "n_routed_experts")
    expert = of("moe_intermediate_size", "intermediate_size")
    shared = of("shared_expert_intermediate_size") or of("n_shared_experts") * expert
    feed_forward = max(of("intermediate_size"), experts * expert + shared)
    layer = width * (4 * max(width, of("num_attention_heads") * of("head_dim")) + 3 * feed_forward)
    return _WIDTH * (2 * of("vocab_size") * width + layers * layer)
