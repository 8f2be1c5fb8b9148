"""Imports LLMServingSim's profiles: the tables of each model, variant and degree.

Every layer becomes signatures that a step runs as often as the simulator looks
the layer up. As there, norms and the sampler of a known model type are those of
tp1 at every degree, and so is moe.csv: at tp1 it is kept by tokens and active
experts; at other degrees the sparse block is what the simulator's BALANCED
routing looks up for a step's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from dooly_backend.config import hardware_for, known_models, load_model
from dooly_backend.database.records import (
    Configuration,
    Environment,
    Measurement,
    Occurrence,
    Signature,
)
from dooly_backend.errors import InputError
from dooly_backend.importers import Profile, Wanted, file_digests, imported_canonical
from dooly_backend.workload import PointKind, WorkloadPoint

from .architecture import KNOWN
from .costs import attention_batch
from .layout import SHORT_DTYPES
from .mapping import ATTENTION, CALLS_PER_BLOCK, DENSE, MOE, ONCE, PER_SEQUENCE, TP_STABLE
from .routing import Routing, expert_parallelism
from .rules import moe_lookup
from .tables import ATTENTION_COLUMNS, DENSE_COLUMNS, MOE_COLUMNS, PER_SEQUENCE_COLUMNS

_LAYER = "model.layers.*"
#: Where the model runs each layer; the export's own rules lead back from there.
PATHS: Mapping[str, tuple[str, ...]] = {
    "embedding": ("model.embed_tokens",),
    "layernorm": (f"{_LAYER}.input_layernorm", f"{_LAYER}.post_attention_layernorm"),
    "qkv_proj": (f"{_LAYER}.self_attn.qkv_proj",),
    "qk_norm": (f"{_LAYER}.self_attn.q_norm",),
    "rotary_emb": (f"{_LAYER}.self_attn.rotary_emb",),
    ATTENTION: (f"{_LAYER}.self_attn.attn",),
    "o_proj": (f"{_LAYER}.self_attn.o_proj",),
    "gate_up_proj": (f"{_LAYER}.mlp.gate_up_proj",),
    "act_fn": (f"{_LAYER}.mlp.act_fn",),
    "down_proj": (f"{_LAYER}.mlp.down_proj",),
    MOE: (f"{_LAYER}.mlp.experts",),
    "final_layernorm": ("model.norm",),
    "lm_head": ("logits_processor",),
    "sampler": ("sampler",),
}
#: Without these the simulator stops; without others it goes on and is too fast.
_NEEDED = ("embedding", "qkv_proj", "o_proj", "lm_head")
_LONG_DTYPES = {short: long for long, short in reversed(list(SHORT_DTYPES.items()))}
_COLUMNS = {
    "dense.csv": DENSE_COLUMNS,
    "per_sequence.csv": PER_SEQUENCE_COLUMNS,
    "attention.csv": ATTENTION_COLUMNS,
    "moe.csv": MOE_COLUMNS,
}
_MAY_LACK = ("moe.csv",)

Signed = dict[str, tuple[Signature, list[Measurement]]]  # by layer


class LLMServingSimImporter:
    """``profiler/perf/HARDWARE/MODEL/VARIANT/tpN``, of a checkout or of a Dooly export."""

    name = "llmservingsim"
    description = "LLMServingSim: profiler/perf of casys-kaist/LLMServingSim, or a Dooly export"

    def read(self, folder: Path, wanted: Wanted) -> list[Profile]:
        """A profile for each model, hardware, variant and degree. Raises InputError."""
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder: give one with LLMServingSim's profiles")
        root = folder.resolve()
        places = [_Place(root, place) for place in _variants(root)]
        places = [place for place in places if wanted.fits(place.model, place.hardware)]
        if not places:
            raise InputError(
                f"{folder} has no such profiles of LLMServingSim: they lie in "
                "profiler/perf/HARDWARE/MODEL/VARIANT/tpN/dense.csv"
            )
        if wanted.config is not None and len({place.model for place in places}) > 1:
            raise InputError("--config is for one model: choose it with --model")
        return [profile for place in places for profile in _profiles(place, wanted)]


def _variants(root: Path) -> list[Path]:
    """Folders of variants: HARDWARE/ORG/MODEL/VARIANT above the tp folders."""
    tables = [path for name in _COLUMNS for path in root.rglob(f"tp*/{name}")]
    return sorted({path.parent.parent for path in tables if "perf" in path.parts})


@dataclass(frozen=True)
class _Place:
    """A variant's folder, and what its path says."""

    root: Path
    folder: Path

    @property
    def _parts(self) -> tuple[str, ...]:
        parts = self.folder.parts
        return parts[len(parts) - parts[::-1].index("perf") :]

    @property
    def hardware(self) -> str:
        return self._parts[0]

    @property
    def model(self) -> str:
        return "/".join(self._parts[1:-1])

    @property
    def variant(self) -> str:
        return self._parts[-1]

    @property
    def degrees(self) -> dict[int, Path]:
        found = {p.name[2:]: p for p in self.folder.glob("tp*") if p.is_dir()}
        return {int(n): found[n] for n in sorted(found, key=_number) if n.isdecimal()}

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


# -- reading ------------------------------------------------------------------


def _profiles(place: _Place, wanted: Wanted) -> Iterator[Profile]:
    meta = _meta(place)
    config = _config(place, wanted)
    tables = {degree: _tables(place, folder) for degree, folder in place.degrees.items()}
    files = [
        place.folder / f"tp{degree}" / name for degree, found in tables.items() for name in found
    ]
    environment = _environment(place, meta, files)
    for degree in tables:
        part = _Part(place, meta, config, tables, degree)
        yield part.profile(environment)


def _tables(place: _Place, folder: Path) -> dict[str, pd.DataFrame]:
    tables = {}
    for name, columns in _COLUMNS.items():
        path = folder / name
        if not path.is_file():
            if name in _MAY_LACK:
                continue
            raise InputError(f"{place.name(path)} is missing: the simulator cannot do without")
        try:
            frame = pd.read_csv(path)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{place.name(path)} cannot be read: {reason}") from None
        unknown = [column for column in frame if column not in columns]
        missing = [column for column in columns if column not in frame]
        if unknown or missing:
            what = f"has a column that is not known: {unknown[0]}" if unknown else ""
            what = what or f"has no column {missing[0]}"
            raise InputError(f"{place.name(path)} {what} (the layout of 2026 is read)")
        if frame["time_us"].isna().any() or (frame["time_us"] < 0).any():
            raise InputError(f"{place.name(path)} has rows without a time, or with one below zero")
        tables[name] = frame
    return tables


def _meta(place: _Place) -> dict[str, Any]:
    path = place.folder / "meta.yaml"
    try:
        meta = yaml.safe_load(path.read_text("utf-8"))
    except OSError:
        raise InputError(f"{place.name(path)} is missing: it says what was profiled") from None
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{place.name(path)} is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(meta, dict):
        raise InputError(f"{place.name(path)} is no mapping")
    return meta


def _config(place: _Place, wanted: Wanted) -> dict[str, Any]:
    """The HF config: given, the simulator's own beside the tables, or a known one."""
    if wanted.config is not None:
        return wanted.config.hf_config
    own = place.root / f"configs/model/{place.model}.json"
    for text in (str(own) if own.is_file() else "", place.model):
        if text == str(own) or text in known_models():
            return load_model(text).hf_config
    raise InputError(
        f"the config of {place.model} is not in configs/model, nor known: give it with --config"
    )


def _environment(place: _Place, meta: Mapping[str, Any], files: list[Path]) -> Environment:
    known = hardware_for(place.hardware)
    kind = known.kind if known else "cpu" if "cpu" in place.hardware.lower() else "cuda"
    versions = (f"vllm {meta['vllm_version']}" if meta.get("vllm_version") else "", "unknown")
    kept = ("gpu", "driver", "clocks", "cuda_version", "profiled_at", "profiler")
    facts = {
        "imported_from": "llmservingsim",
        "variant": place.variant,
        "files": file_digests(files, place.root),
        "samples": "the tables' one time each: they hold no raw samples",
        **{name: str(meta[name]) for name in kept if meta.get(name)},
    }
    return Environment(place.hardware, kind, "llmservingsim", next(filter(None, versions)), facts)


# -- building -----------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One degree of a variant, with the others' tables beside it."""

    place: _Place
    meta: Mapping[str, Any]
    config: dict[str, Any]
    all_tables: Mapping[int, Mapping[str, pd.DataFrame]]
    degree: int

    def profile(self, environment: Environment) -> Profile:
        notes: list[str] = []
        signed = self._lines()
        signed[ATTENTION] = self._attention(notes)
        if (moe := self._moe(notes)) is not None:
            signed[MOE] = moe
        self._check(signed)
        occurrences = [
            self._occurrence(path, layer, signed[layer][0])
            for layer, paths in PATHS.items()
            if layer in signed
            for path in paths
        ]
        notes.append("collectives are in no table of LLMServingSim: steps miss them")
        notes.append("skew.csv and skew_fit.csv are left out: they correct unequal decodes")
        return Profile(
            environment,
            self._configuration(),
            tuple(_at(occurrence, n) for n, occurrence in enumerate(occurrences)),
            dict(signed.values()),
            tuple(notes),
        )

    def _check(self, signed: Signed) -> None:
        """Layers that the model's type has. Raises InputError for one that is missing."""
        has = KNOWN.get(str(self.config.get("model_type")), frozenset())
        feed_forward = (MOE,) if MOE in signed or MOE in has else ("gate_up_proj", "down_proj")
        for layer in (*_NEEDED, *feed_forward, *has):
            if layer not in signed:
                raise InputError(
                    f"{self.place.name(self.place.folder)}/tp{self.degree} has no layer {layer!r}, "
                    f"which {self.place.model} needs"
                )

    def _lines(self) -> Signed:
        """Layers by tokens and by sequences; those that the simulator reads from tp1, of tp1."""
        known = str(self.config.get("model_type")) in KNOWN
        stable = 1 if known and 1 in self.all_tables else self.degree
        signed: Signed = {}
        for file, axis, layers in (
            ("dense.csv", "tokens", DENSE),
            ("per_sequence.csv", "sequences", PER_SEQUENCE),
        ):
            kind: PointKind = "tokens" if axis == "tokens" else "requests"
            names = set(self.all_tables[self.degree][file]["layer"])
            if unknown := sorted(names - set(layers)):
                raise InputError(f"{file} of {self.place.model} has an unknown layer: {unknown[0]}")
            for layer in layers:
                degree = stable if layer in TP_STABLE else self.degree
                frame = self.all_tables[degree][file]
                rows = frame[frame["layer"] == layer]
                if not rows.empty:
                    points = zip(rows[axis], rows["time_us"], strict=True)
                    measured = [_measurement(kind, int(n), us) for n, us in points]
                    signed[layer] = self._signature(layer, kind, degree), measured
        return signed

    def _attention(self, notes: list[str]) -> tuple[Signature, list[Measurement]]:
        found: dict[str, Measurement] = {}
        skipped = 0
        rows = self.all_tables[self.degree]["attention.csv"]
        for chunk, history, size, context, us in rows[list(ATTENTION_COLUMNS)].itertuples(
            index=False
        ):
            # One token after others is a decode here, one after none a prefill.
            if (chunk == 1 and history) or (size and not context) or not (chunk or size):
                skipped += 1
                continue
            batch = attention_batch(int(chunk), int(history), int(size), int(context))
            point = WorkloadPoint.of("batch", batch)
            found.setdefault(batch.key, Measurement(point, (float(us),)))
        if skipped:
            notes.append(f"{skipped} rows of attention.csv are no batch of an engine: left out")
        return self._signature(ATTENTION, "batch", self.degree), list(found.values())

    def _moe(self, notes: list[str]) -> tuple[Signature, list[Measurement]] | None:
        first = min(self.all_tables)
        frame = self.all_tables[first].get("moe.csv")
        if frame is None:
            return None
        experts = next((self.config[k] for k in _EXPERT_KEYS if self.config.get(k)), None)
        each = self.config.get("num_experts_per_tok")
        if not experts or not each:
            raise InputError(
                f"moe.csv of {self.place.model} needs num_experts and num_experts_per_tok of its "
                "config: give it with --config"
            )
        rows = [
            (int(tokens), int(active), float(us))
            for tokens, active, us in frame[list(MOE_COLUMNS)].itertuples(index=False)
        ]
        if self.degree == first:
            routing = {"experts": int(experts), "top_k": int(each)}
            signature = self._signature(MOE, "routing", first, routing=routing)
            return signature, [
                Measurement(WorkloadPoint("routing", n, num_experts=active), (us,))
                for n, active, us in rows
            ]
        degree = expert_parallelism(int(experts), self.degree)
        balanced = Routing(int(experts), min(int(each), int(experts)), degree)
        steps = sorted({balanced.step_tokens(tokens) for tokens, _, _ in rows})
        notes.append(f"experts at tp{self.degree}: by tokens, as BALANCED routing looks them up")
        looked_up = moe_lookup(rows)
        return self._signature(MOE, "tokens", self.degree), [
            _measurement("tokens", n, looked_up(balanced, n) / 1e3) for n in steps
        ]

    # -- records --------------------------------------------------------------

    def _signature(self, layer: str, kind: PointKind, degree: int, **more: Any) -> Signature:
        facts = {
            "model": self.place.model,
            "variant": self.place.variant,
            "tensor_parallel": degree,
            **more,
        }
        name = f"llmservingsim::{layer}"
        canonical = imported_canonical("llmservingsim", layer, facts)
        return Signature(name, "operation", kind, canonical)

    def _occurrence(self, path: str, layer: str, signature: Signature) -> Occurrence:
        if layer in ONCE:
            return Occurrence(0, path, "LLMServingSim", signature, 1)
        layers = self._layers
        count = layers * CALLS_PER_BLOCK.get(layer, 1) // len(PATHS[layer])
        return Occurrence(0, path, "LLMServingSim", signature, count, tuple(range(layers)))

    @property
    def _layers(self) -> int:
        return int(self.config.get("num_hidden_layers") or self.config.get("n_layer") or 1)

    def _configuration(self) -> Configuration:
        effective = self.meta.get("engine_effective")
        effective = effective if isinstance(effective, dict) else {}
        weights, _, cache = self.place.variant.partition("-kv")
        limits = ("max_num_batched_tokens", "max_num_seqs")
        facts = {name: int(effective[name]) for name in limits if effective.get(name)}
        if self.config.get("max_position_embeddings"):
            facts["max_model_len"] = int(self.config["max_position_embeddings"])
        return Configuration(
            model=self.place.model,
            hf_config=self.config,
            engine="llmservingsim",
            backend=str(effective.get("attention_backend") or "unknown"),
            dtype=_LONG_DTYPES.get(weights, weights),
            kv_cache_dtype=_LONG_DTYPES.get(cache, cache) or "auto",
            block_size=int(effective.get("block_size") or 16),
            tensor_parallel=self.degree,
            pipeline_parallel=1,
            execution_mode=str(effective.get("execution_mode") or "eager"),
            num_layers=self._layers,
            facts=facts,
        )


_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def _measurement(kind: PointKind, number: int, us: float) -> Measurement:
    if kind == "requests":
        return Measurement(WorkloadPoint(kind, num_reqs=number), (float(us),))
    return Measurement(WorkloadPoint(kind, num_tokens=number), (float(us),))


def _at(occurrence: Occurrence, position: int) -> Occurrence:
    return replace(occurrence, position=position)
