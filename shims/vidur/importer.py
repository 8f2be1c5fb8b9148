"""Imports Vidur's profiling tables: the times of one model by tokens, attention and collectives.

Each operation of a layer becomes a signature that a step runs once per layer,
so that `LatencyModel.step_us` is what Vidur adds up. Two of Vidur's rules are
undone on the way in, and done again on the way out: it rounds the tokens of a
decode step up to 8, which is in attention's decode rows here (for those of a
Dooly export it takes back what that export took out); and exports label KV
lengths by a granularity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dooly_backend.database.records import (
    Configuration,
    Environment,
    Measurement,
    Occurrence,
    Signature,
)
from dooly_backend.errors import InputError
from dooly_backend.importers import Profile, Wanted, imported_canonical
from dooly_backend.workload import Batch, WorkloadPoint

from .mapping import ATTENTION_OPS, MLP_OPS
from .origin import Lengths, environment_of, model_of
from .reading import (
    ATTENTION_COLUMNS,
    DEGREE,
    MLP_COLUMNS,
    MODEL_COLUMNS,
    NETWORK_COLUMNS,
    read_table,
    rounded_up,
    times_by,
)
from .rules import SUMMED_OPS
from .sources import Source, find_sources
from .tables import ALL_REDUCES_PER_LAYER, COPY_COLUMN, VIDUR_ELEMENT_BYTES

_LAYER = "model.layers.*"
#: Where a layer runs each operation; the export's own rules lead back from there.
PATHS: Mapping[str, str] = {
    "input_layernorm": f"{_LAYER}.input_layernorm",
    "attn_pre_proj": f"{_LAYER}.self_attn.qkv_proj",
    "attn_rope": f"{_LAYER}.self_attn.rotary_emb",
    "attn_kv_cache_save": f"{_LAYER}.self_attn.kv_cache_save",
    "attention": f"{_LAYER}.self_attn.attn",
    "attn_post_proj": f"{_LAYER}.self_attn.o_proj",
    "post_attention_layernorm": f"{_LAYER}.post_attention_layernorm",
    "mlp_up_proj": f"{_LAYER}.mlp.gate_up_proj",
    "mlp_act": f"{_LAYER}.mlp.act_fn",
    "mlp_down_proj": f"{_LAYER}.mlp.down_proj",
    "add": _LAYER,
    "all_reduce": _LAYER,
}
_NOT_GATED = {"mlp_up_proj": f"{_LAYER}.mlp.fc1", "mlp_down_proj": f"{_LAYER}.mlp.fc2"}
#: The profiler's own dtype; its tables do not say it.
_DTYPE, _BLOCK_SIZE = "float16", 16

Samples = dict[int, Measurement]  # by tokens
Build = dict[str, tuple[Signature, list[Measurement]]]


class VidurImporter:
    """Vidur's mlp.csv, attention.csv and all_reduce.csv, in both layouts."""

    name = "vidur"
    description = "Vidur: tables of microsoft/vidur, of vidur 0.0.26, or of a Dooly export"

    def read(self, folder: Path, wanted: Wanted) -> list[Profile]:
        """A profile for each model, device, degree and attention backend. Raises InputError."""
        sources = find_sources(folder, wanted)
        if wanted.config is not None and len({source.model for source in sources}) > 1:
            raise InputError("--config is for one model: choose it with --model")
        return [profile for source in sources for profile in _profiles(source, wanted)]


@dataclass(frozen=True)
class _Tables:
    source: Source
    mlp: pd.DataFrame
    attention: pd.DataFrame
    network: pd.DataFrame | None
    sizes: Mapping[str, Any]  # the model's columns


def _profiles(source: Source, wanted: Wanted) -> Iterator[Profile]:
    tables = _read(source)
    environment = environment_of(source)
    config, layers = model_of(source, wanted, tables.sizes)
    keys = [DEGREE, "block_size", "attention_backend"]
    for (degree, block_size, backend), attention in tables.attention.groupby(keys):
        mlp = tables.mlp[tables.mlp[DEGREE] == degree]
        if mlp.empty:
            raise InputError(
                f"{source.mlp.relative_to(source.root)} has no rows of tensor parallel {degree}, "
                f"{source.attention.name} has"
            )
        # Vidur's profiler writes the name of an enumeration.
        backend = str(backend).removeprefix("AttentionBackend.")
        part = _Part(tables, int(degree), int(block_size), backend, layers, mlp, attention)
        yield part.profile(environment, config)


def _read(source: Source) -> _Tables:
    mlp = read_table(source.mlp, source.root, MLP_COLUMNS, MLP_OPS)
    attention = read_table(source.attention, source.root, ATTENTION_COLUMNS, ATTENTION_OPS)
    if "attention_backend" not in attention:
        attention = attention.assign(attention_backend="unknown")
    network = None
    if source.network is not None:
        network = read_table(source.network, source.root, NETWORK_COLUMNS, ["all_reduce"])
    sizes: dict[str, Any] = {}
    for column in MODEL_COLUMNS:
        values = mlp[column].unique().tolist()
        if len(values) > 1:
            raise InputError(
                f"{source.mlp.relative_to(source.root)} holds several models: {column} is {values}"
            )
        sizes[column] = values[0]
    return _Tables(source, mlp, attention, network, sizes)


@dataclass(frozen=True)
class _Part:
    """One degree with one attention backend."""

    tables: _Tables
    degree: int
    block_size: int
    backend: str
    layers: int
    mlp: pd.DataFrame
    attention: pd.DataFrame

    def profile(self, environment: Environment, config: dict[str, Any]) -> Profile:
        notes: list[str] = []
        by_tokens = self._by_tokens(notes)
        built = {
            op: (self._signature(op, "tokens"), list(_token_points(times)))
            for op, times in by_tokens.items()
        }
        attention = self._attention(self._layer_ms(by_tokens), notes)
        built["attention"] = (self._signature("attention", "batch"), attention)
        ordered = [op for op in PATHS if op in built]
        return Profile(
            environment,
            self._configuration(config),
            tuple(self._occurrence(n, op, built[op][0]) for n, op in enumerate(ordered)),
            dict(built.values()),
            tuple(notes),
        )

    # -- what is over tokens --------------------------------------------------

    def _by_tokens(self, notes: list[str]) -> dict[str, pd.DataFrame]:
        """Milliseconds of each operation by tokens. What Vidur does not add up is left out."""
        found = {op: times_by(self.mlp, op, ["num_tokens"]) for op in SUMMED_OPS}
        found["attn_kv_cache_save"] = self._cache_writes(notes)
        found["all_reduce"] = self._all_reduce(notes)
        notes.append("emb and the reshapes of attention are left out: Vidur does not add them up")
        kept = {op: times for op, times in found.items() if not times.empty}
        if "attn_kv_cache_save" in kept and not kept["attn_kv_cache_save"]["median"].any():
            del kept["attn_kv_cache_save"]
        return kept

    def _cache_writes(self, notes: list[str]) -> pd.DataFrame:
        """attn_kv_cache_save by tokens: of a prefill its chunk, of decodes their number."""
        if self.tables.source.layout == "pypi":
            return pd.DataFrame()  # trained there, and left out of the sum
        frame = self.attention
        tokens = frame[["prefill_chunk_size", "batch_size"]].max(axis=1)
        return times_by(frame.assign(num_tokens=tokens), "attn_kv_cache_save", ["num_tokens"])

    def _all_reduce(self, notes: list[str]) -> pd.DataFrame:
        if self.degree == 1:
            return pd.DataFrame()
        frame = self.tables.network
        if frame is not None:
            same = (frame["num_workers"] == self.degree) & (
                frame["devices_per_node"] == self.degree
            )
            frame = frame[same]
        if frame is None or frame.empty:
            notes.append(
                f"no all_reduce of {self.degree} devices: steps of tensor parallel {self.degree} "
                "miss their collectives"
            )
            return pd.DataFrame()
        per_token = VIDUR_ELEMENT_BYTES * int(self.tables.sizes["n_embd"])
        whole = frame[(frame["size"] % per_token == 0) & (frame["size"] > 0)]
        return times_by(
            whole.assign(num_tokens=whole["size"] // per_token), "all_reduce", ["num_tokens"]
        )

    def _layer_ms(self, by_tokens: Mapping[str, pd.DataFrame]) -> Callable[[int], float]:
        """The median time of a layer without attention, by tokens."""
        lines = [
            (times.index.to_numpy(float), times["median"].to_numpy(float) * self._calls(op))
            for op, times in by_tokens.items()
        ]

        def at(tokens: int) -> float:
            return float(sum(np.interp(tokens, places, values) for places, values in lines))

        return at

    # -- attention ------------------------------------------------------------

    def _attention(self, layer_ms: Callable[[int], float], notes: list[str]) -> list[Measurement]:
        frame = self.attention
        is_prefill = frame["prefill_chunk_size"] > 0
        found: dict[str, Measurement] = {}
        prefills = times_by(
            frame[is_prefill & (frame["batch_size"] == 1)],
            "attn_prefill",
            ["prefill_chunk_size", "kv_cache_size"],
        )
        lengths = self._lengths()
        for place, times in _rows(prefills):
            chunk, label = place
            history = lengths.history(chunk, label)
            if chunk == 1 and history:
                continue  # one token after others is a decode
            _add(found, Batch.prefill(chunk, history), times)
        decodes = times_by(frame[~is_prefill], "attn_decode", ["batch_size", "kv_cache_size"])
        below = 0
        for (size, label), times in _rows(decodes):
            rounding = layer_ms(rounded_up(size)) - layer_ms(size)
            below += times[1] + rounding < 0
            _add(found, Batch.decode(size, lengths.context(label)), times, rounding)
        if below:
            notes.append(f"{below} decode rows of attention are 0: with rounding they were below")
        if not found:
            name = self.tables.source.attention.relative_to(self.tables.source.root)
            raise InputError(f"{name} has no times of prefills or decodes at tp{self.degree}")
        return list(found.values())

    def _lengths(self) -> Lengths:
        own = COPY_COLUMN in self.attention
        decodes = self.attention.loc[self.attention["prefill_chunk_size"] == 0, "kv_cache_size"]
        longest = int(self.attention["kv_cache_size"].max())
        ranges = self.tables.source.manifest.get("ranges") or {}
        if "max_model_len" in self.attention:
            longest = min(longest, int(self.attention["max_model_len"].max()))
        return Lengths(
            own,
            self.tables.source.layout,
            int(decodes.min()) if len(decodes) else 1,
            int(ranges.get("max_length") or longest),
        )

    # -- records --------------------------------------------------------------

    def _calls(self, op: str) -> int:
        return ALL_REDUCES_PER_LAYER if op == "all_reduce" else 1

    def _signature(self, op: str, kind: Any) -> Signature:
        facts = {
            "model": self.tables.source.model,
            "sizes": dict(self.tables.sizes),
            "tensor_parallel": self.degree,
        }
        if kind == "batch":
            facts |= {"backend": self.backend, "block_size": self.block_size}
        name = f"vidur::{op}"
        return Signature(name, "operation", kind, imported_canonical("vidur", op, facts))

    def _occurrence(self, position: int, op: str, signature: Signature) -> Occurrence:
        gated = bool(self.tables.sizes["use_gated_mlp"])
        path = PATHS[op] if gated else _NOT_GATED.get(op, PATHS[op])
        return Occurrence(
            position,
            path,
            "Vidur",
            signature,
            self.layers * self._calls(op),
            tuple(range(self.layers)),
        )

    def _configuration(self, config: dict[str, Any]) -> Configuration:
        source, sizes = self.tables.source, self.tables.sizes
        facts: dict[str, Any] = {
            "head_dim": int(sizes["n_embd"]) // int(sizes["n_head"]),
            "vocab_size": int(sizes["vocab_size"]),
        }
        if "max_model_len" in self.attention:
            facts["max_model_len"] = int(self.attention["max_model_len"].max())
        return Configuration(
            model=source.model,
            hf_config=config,
            engine="vidur",
            backend=self.backend,
            dtype=str(source.manifest.get("dtype") or _DTYPE),
            kv_cache_dtype=str(source.manifest.get("kv_cache_dtype") or "auto"),
            block_size=self.block_size or _BLOCK_SIZE,
            tensor_parallel=self.degree,
            pipeline_parallel=1,
            execution_mode="eager",
            num_layers=self.layers,
            facts=facts,
        )


def _rows(frame: pd.DataFrame) -> Iterator[tuple[tuple[int, int], tuple[float, float, float]]]:
    for place, *times in frame.itertuples():
        yield (int(place[0]), int(place[1])), (times[0], times[1], times[2])


def _token_points(frame: pd.DataFrame) -> Iterator[Measurement]:
    for tokens, *times in frame.itertuples():
        if tokens > 0:
            yield Measurement(WorkloadPoint("tokens", int(tokens)), _samples(*times))


def _add(
    found: dict[str, Measurement],
    batch: Batch,
    times: tuple[float, float, float],
    moved: float = 0.0,
) -> None:
    """The measurement of `batch`; of labels that mean one batch the first stays."""
    if batch.key not in found:
        samples = _samples(*(time + moved for time in times))
        found[batch.key] = Measurement(WorkloadPoint.of("batch", batch), samples)


def _samples(low: float, median: float, high: float) -> tuple[float, ...]:
    """Microseconds, none below zero. The median stays what it was."""
    middle = max(0.0, median * 1e3)
    return min(max(0.0, low * 1e3), middle), middle, max(high * 1e3, middle)
