"""The files of an export, laid out as LLMServingSim's repository is: to be copied over it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dooly_backend import __version__
from dooly_backend.config import hardware_for
from dooly_backend.database.records import Configuration, Environment
from dooly_backend.errors import InputError

from ..common import csv_text, latest, repository_name, write
from .costs import LayerCosts
from .grids import Grids
from .options import LLMServingSimOptions
from .routing import expert_parallelism
from .tables import (
    ATTENTION_COLUMNS,
    DENSE_COLUMNS,
    MOE_COLUMNS,
    PER_SEQUENCE_COLUMNS,
    DegreeTables,
)

#: The simulator's short names of dtypes, by which it finds the folder of a variant.
SHORT_DTYPES: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "int8": "int8",
    "int4": "int4",
}
#: Of a device whose figures nobody gave; `notes` say which.
UNKNOWN_MEMORY_GB, UNKNOWN_BANDWIDTH_GBS = 1024.0, 1000.0
UNKNOWN_LINK_GBS, UNKNOWN_LINK_NS = 16.0, 20_000
GIB_PER_GB = 1e9 / 2**30
_HOST = {"mem_size": 512, "mem_bw": 256, "mem_latency": 0}


@dataclass(frozen=True)
class Place:
    """Where an export's files go, relative to the simulator's root."""

    hardware: str
    model: str  # ORG/NAME
    variant: str

    @property
    def perf(self) -> str:
        return f"profiler/perf/{self.hardware}/{self.model}/{self.variant}"

    @property
    def config(self) -> str:
        return f"configs/model/{self.model}.json"

    def cluster(self, degree: int) -> str:
        name = self.model.rpartition("/")[2]
        return f"configs/cluster/dooly_{self.hardware}_{name}_{self.variant}_tp{degree}.json"


def place_of(
    configuration: Configuration, environment: Environment, options: LLMServingSimOptions
) -> Place:
    known = hardware_for(environment.device)
    name = options.hardware_name or (known.name if known and known.kind == "cuda" else "")
    name = name or re.sub(r"\W+|_", "", environment.device) or "DEVICE"
    return Place(
        name if options.hardware_name else name.upper(),
        repository_name(configuration.model),
        options.variant or variant_of(configuration),
    )


def variant_of(configuration: Configuration) -> str:
    """As the simulator names it, by the weights and the KV cache: ``bf16``, ``fp8-kvfp8``."""
    short = SHORT_DTYPES.get(configuration.weight_dtype, configuration.weight_dtype)
    cache = configuration.kv_cache_dtype
    return short if cache == "auto" else f"{short}-kv{SHORT_DTYPES.get(cache, cache)}"


def write_files(
    folder: Path,
    place: Place,
    all_costs: Sequence[LayerCosts],
    tables: Mapping[int, DegreeTables],
    grids: Grids,
    hardware: Hardware,
) -> None:
    """Write everything but the manifest. Raises OSError."""
    architecture = all_costs[0].architecture
    for degree, rows in tables.items():
        root = folder / place.perf / f"tp{degree}"
        write(root / "dense.csv", csv_text(DENSE_COLUMNS, rows.dense))
        write(root / "per_sequence.csv", csv_text(PER_SEQUENCE_COLUMNS, rows.per_sequence))
        write(root / "attention.csv", csv_text(ATTENTION_COLUMNS, rows.attention))
        if rows.moe:
            write(root / "moe.csv", csv_text(MOE_COLUMNS, rows.moe))
    meta = _meta(place, all_costs, grids)
    text = yaml.safe_dump(meta, sort_keys=False, allow_unicode=True)
    write(folder / place.perf / "meta.yaml", text)
    if not architecture.known:
        write(folder / f"profiler/models/{architecture.model_type}.yaml", architecture.yaml())
    write(folder / place.config, _json(architecture.config))
    for costs in all_costs:
        write(folder / place.cluster(costs.degree), _json(_cluster(place, costs, grids, hardware)))


def _meta(place: Place, all_costs: Sequence[LayerCosts], grids: Grids) -> dict[str, Any]:
    """What the simulator's own profiler records, as far as the database knows it."""
    costs = all_costs[0]
    configuration, environment = costs.model.configuration, costs.model.environment
    facts = environment.facts
    attention = grids.attention
    cuda = next((facts[key] for key in ("cuda", "cuda_version") if facts.get(key)), None)
    meta = {
        "profiler": f"dooly-backend {__version__}",
        f"{environment.engine}_version": environment.engine_version,
        "cuda_version": str(cuda) if cuda else None,
        "gpu": environment.device,
        "hardware": place.hardware,
        "driver": facts.get("driver"),
        "clocks": facts.get("clocks"),
        "profiled_at": latest(c.model for c in all_costs),
        "architecture": costs.architecture.model_type,
        "architecture_sha256": costs.architecture.digest,
        "model": place.model,
        "variant": place.variant,
        "tp_degrees": [c.degree for c in all_costs],
        "engine_effective": {
            "max_num_batched_tokens": grids.max_tokens,
            "max_num_seqs": grids.max_seqs,
            "block_size": configuration.block_size,
            "attention_backend": configuration.backend,
            "execution_mode": configuration.execution_mode,
            "dtype": configuration.dtype,
            "kv_cache_dtype": configuration.kv_cache_dtype,
        },
        "attention_grid": {
            "max_kv": grids.max_kv,
            "chunks": [0, *attention.chunks],
            "n_decode": [0, *attention.sizes],
            "kv_prefill": list(attention.histories),
            "kv_decode": list(attention.contexts),
        },
        "skew_profile": {"enabled": False},
        "skew_fit": {"enabled": False},
        "environment": {"digest": environment.digest, "facts": json.loads(json.dumps(facts))},
    }
    return {key: value for key, value in meta.items() if value is not None}


# -- the cluster --------------------------------------------------------------


@dataclass(frozen=True)
class Hardware:
    """The device in the simulator's terms. `notes` say what of it is not known."""

    memory_gb: float
    memory_bandwidth_gbs: float
    link_gbs: float
    link_ns: int
    notes: tuple[str, ...] = ()


def hardware_of(environment: Environment, given: Mapping[str, Any] | None) -> Hardware:
    """By `given` (a description of configs/hardware as a dict), or the shipped one.

    Raises InputError for wrong values.
    """
    if given is None:
        known = hardware_for(environment.device)
        given = known.model_dump() if known else {}
    notes = []
    memory = _positive(given, "memory_gb")
    bandwidth = _positive(given, "memory_bandwidth_gbs")
    link = _positive(given.get("interconnect") or {}, "bandwidth_gbs")
    if memory is None:
        notes.append(
            f"The device's memory is not known: the clusters have {UNKNOWN_MEMORY_GB:g} GB; set "
            "mem_size and mem_util so that the KV cache has the engine's number of blocks."
        )
    if bandwidth is None:
        notes.append("The device's memory bandwidth is not known: the clusters' figure is made up.")
    if link is None:
        notes.append(
            "The interconnect is not known: the clusters have the simulator's default link, so "
            "collectives are not this device's."
        )
    return Hardware(
        memory or UNKNOWN_MEMORY_GB,
        bandwidth or UNKNOWN_BANDWIDTH_GBS,
        # Datasheets count both directions.
        link / 2 if link else UNKNOWN_LINK_GBS,
        0 if link else UNKNOWN_LINK_NS,
        tuple(notes),
    )


def _cluster(place: Place, costs: LayerCosts, grids: Grids, hardware: Hardware) -> dict[str, Any]:
    configuration, architecture = costs.model.configuration, costs.architecture
    degree = costs.degree
    limits = {
        "max_num_batched_tokens": grids.max_tokens,
        "max_num_seqs": grids.max_seqs,
    }
    facts = configuration.facts
    instance = {
        "model_name": place.model,
        "hardware": place.hardware,
        "npu_mem": {
            "mem_size": round(hardware.memory_gb * GIB_PER_GB, 2),
            "mem_bw": hardware.memory_bandwidth_gbs,
            "mem_latency": 0,
        },
        "num_npus": degree,
        "tp_size": degree,
        **(
            {"ep_size": expert_parallelism(architecture.experts, degree)}
            if architecture.experts
            else {}
        ),
        "pd_type": None,
        # What the engine had, where the tables cover it.
        **{name: min(int(facts.get(name) or limit), limit) for name, limit in limits.items()},
        "block_size": configuration.block_size,
        "dtype": configuration.weight_dtype,
        "kv_cache_dtype": configuration.kv_cache_dtype,
    }
    return {
        "num_nodes": 1,
        "link_bw": hardware.link_gbs,
        "link_latency": hardware.link_ns,
        "nodes": [{"num_instances": 1, "cpu_mem": _HOST, "instances": [instance]}],
    }


def _positive(given: Mapping[str, Any], name: str) -> float | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise InputError(f"hardware: {name} must be a number above zero, not {value!r}")
    return float(value)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
