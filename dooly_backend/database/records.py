"""The rows of the latency database, as frozen dataclasses.

All times are microseconds. `digest()` of an environment or a configuration is
its identity: two rows with equal facts are the same row on every machine.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from dooly_backend.errors import InputError
from dooly_backend.workload import Batch, PointKind, WorkloadPoint

Granularity = Literal["operation", "module"]


#: How the reason starts for which a limit of the engine, not the device, keeps a point out.
#: Another run may have set other limits: to it the point is open.
BEYOND_LIMITS = "beyond the engine's limits"


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal facts give equal text.

    Keys become text before they are sorted, so that what comes back from JSON
    (``{2: ..., 10: ...}`` as ``{"2": ..., "10": ...}``) keeps its digest.
    """
    plain = json.loads(json.dumps(value))
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


@dataclass(frozen=True)
class Environment:
    """Where a measurement was made; two environments never mix.

    `facts` holds everything else that can change a time: driver, clocks,
    CPU capability, threads, versions of torch and the attention backends.
    """

    device: str  # "AMD EPYC (2 threads)", "NVIDIA H200"
    device_kind: str  # "cpu" or "cuda"
    engine: str  # "vllm"
    engine_version: str
    facts: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        return digest([self.device, self.device_kind, self.engine, self.engine_version, self.facts])


#: Key of a configuration's `hf_config` for what the engine quantises by itself. It stands there,
#: as the rank does, because such a model is another one.
ENGINE_QUANTIZATION = "dooly_quantization"


def checkpoint_quantization(hf_config: Mapping[str, Any]) -> str | None:
    """The method that a config.json names for its checkpoint's weights ("fp8"); None: none."""
    for config in (hf_config, hf_config.get("text_config")):
        if not isinstance(config, Mapping):
            continue
        quantization = config.get("quantization_config") or config.get("compression_config")
        if isinstance(quantization, Mapping):
            return str(quantization.get("quant_method") or "unknown")
    return None


def _compressed_format(hf_config: Mapping[str, Any]) -> str | None:
    """The one format of 8 bits that compressed-tensors names for all groups of weights."""
    groups = (hf_config.get("quantization_config") or {}).get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    found = {f"{w.get('type')}{w.get('num_bits')}" for w in weights}
    return {"float8": "fp8", "int8": "int8"}.get(found.pop()) if len(found) == 1 else None


@dataclass(frozen=True)
class Configuration:
    """A model as one engine serves it. `hf_config` is the HF config.json, whole.

    `facts` holds what the engine derived from it and simulators need:
    head_dim, max_model_len, vocab_size, ...
    """

    model: str
    hf_config: dict[str, Any]
    engine: str
    backend: str  # attention backend: "CPU_ATTN", "FLASH_ATTN", ...
    dtype: str  # "bfloat16"
    kv_cache_dtype: str  # "auto", "fp8"
    block_size: int  # KV-cache block, tokens
    tensor_parallel: int
    pipeline_parallel: int
    execution_mode: str  # "eager", "piecewise", "full_graph"
    num_layers: int  # of the whole model
    facts: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        names = [n for n in self.__dataclass_fields__ if n != "facts"]
        return digest([getattr(self, name) for name in names])

    @property
    def quantization(self) -> str:
        """How the weights are quantised: by the engine, or as their checkpoint has them; "none"."""
        by_engine = self.hf_config.get(ENGINE_QUANTIZATION)
        return str(by_engine or checkpoint_quantization(self.hf_config) or "none")

    @property
    def weight_dtype(self) -> str:
        """The number format of the linear layers' weights: "fp8" or "int8", else `dtype`.

        Other formats (four bits, several in one model) are not told apart from `dtype`.
        """
        for format_ in ("fp8", "int8"):
            if format_ in self.quantization:
                return format_
        return _compressed_format(self.hf_config) or self.dtype

    @property
    def stage(self) -> int:
        """Index of the pipeline stage whose rank it is."""
        return int(self.hf_config.get("dooly_rank", {}).get("stage", 0))

    @property
    def expert_parallel(self) -> int:
        """Ranks that the experts are divided among."""
        return int(self.hf_config.get("dooly_rank", {}).get("expert_parallel", 1))

    @property
    def layers_run(self) -> int:
        """Layers of one step: all of the model's, or those of the rank's pipeline stage."""
        first, stop = self.facts.get("stage_layers", (0, self.num_layers))
        return stop - first


@dataclass(frozen=True)
class Signature:
    """An operation or module by what the model decides of it (DESIGN, invariant 1).

    `canonical` is the text whose SHA-256 is `hash`; `kind` says what of the
    request its latency depends on.
    """

    name: str  # "QKVParallelLinear", "aten::add.Tensor"
    granularity: Granularity
    kind: PointKind
    canonical: str

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.canonical.encode()).hexdigest()

    @property
    def is_attention(self) -> bool:
        """Whether it works through a batch's KV cache, and does not only look up its requests.

        A sampler that looks up where each request's last token lies depends on the batch, too.
        """
        return self.kind == "batch" and _NO_STATE not in self.canonical

    @property
    def is_collective(self) -> bool:
        """Whether it is communication between ranks (`profiling/collectives.py`)."""
        return '"collective":' in self.canonical


#: In the canonical text of what holds no state of the engine, such as a KV cache.
_NO_STATE = '"stateful":{}'


@dataclass(frozen=True)
class Occurrence:
    """A signature at one place of a configuration's call graph.

    `path` is the module path with layer numbers as ``*``
    ("model.layers.*.self_attn.qkv_proj", "logits_processor", "sampler"); for an
    operation it is the module that runs it. `layers` lists the full model's
    layers it stands for (empty: outside the layers); `count` is how often one
    step of the full model runs it in all.
    """

    position: int  # order in the pass
    path: str
    module_class: str  # "QKVParallelLinear"
    signature: Signature
    count: int
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """Samples of one signature at one point in one environment, in microseconds.

    `timing_us` is for how long taking them held the device, with warm-ups, rounds that
    were not kept, and what ran around each call. It is the cost of a measurement and no
    part of what it says: None where nobody looked, and in what is read back
    (`Database.timing_us`).
    """

    point: WorkloadPoint
    samples_us: tuple[float, ...]
    unstable: bool = False  # the spread stayed too large after measuring again
    timing_us: float | None = field(default=None, compare=False)

    @cached_property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @cached_property
    def mean_us(self) -> float:
        return statistics.fmean(self.samples_us)

    @cached_property
    def min_us(self) -> float:
        return min(self.samples_us)

    @cached_property
    def max_us(self) -> float:
        return max(self.samples_us)

    @cached_property
    def std_us(self) -> float:
        return statistics.pstdev(self.samples_us)

    @cached_property
    def p25_us(self) -> float:
        """Lower quartile: the estimate that bursts of noise do not move."""
        if len(self.samples_us) == 1:
            return self.samples_us[0]
        return statistics.quantiles(self.samples_us, n=4, method="inclusive")[0]


@dataclass(frozen=True)
class SkippedPoint:
    """A point that cannot run in an environment, and why (memory, an engine limit)."""

    point: WorkloadPoint
    reason: str


@dataclass(frozen=True)
class StepMeasurement:
    """A live step of `num_layers` layers beside the sum of its operations.

    What the live step takes beyond the operations is the step's own cost:
    input preparation, module glue, output handling.
    """

    batch: Batch
    num_layers: int
    live_us: tuple[float, ...]
    operations_us: float


#: How an engine runs a step: operation by operation, as pieces of CUDA graphs, as one graph.
StepMode = Literal["eager", "piecewise", "full"]
Part = Literal["device", "launch", "before", "schedule", "output"]


@dataclass(frozen=True)
class StreamStep:
    """A step as the engine runs it by default, one of many equal ones in a row.

    `interval_us` are the times between the tokens of one step and those of the
    next, `launch_us` what the host needed to launch each: the longer of the
    two decides. `device_us` is how long the device was at each by its own
    clock, waiting for launches included (nothing on a CPU). `padded_tokens`
    are the tokens with the padding of the graph. `alone_us` are the times of the
    same step on an idle device, from handing it over until it is done (nothing
    where they were not taken).
    """

    batch: Batch
    num_layers: int
    mode: StepMode
    padded_tokens: int
    interval_us: tuple[float, ...]
    launch_us: tuple[float, ...]
    device_us: tuple[float, ...] = ()
    alone_us: tuple[float, ...] = ()

    @cached_property
    def median_us(self) -> float:
        return statistics.median(self.interval_us)

    @cached_property
    def launch_median_us(self) -> float:
        return statistics.median(self.launch_us)

    def with_samples_of(self, later: StreamStep) -> StreamStep:
        """The same step with the samples of another time behind its own."""
        return replace(
            later,
            interval_us=self.interval_us + later.interval_us,
            launch_us=self.launch_us + later.launch_us,
            device_us=self.device_us + later.device_us,
            alone_us=self.alone_us + later.alone_us,
        )


@dataclass(frozen=True)
class HostStep:
    """What the engine's core does on the host for a step in which `num_reqs` requests decode.

    `schedule_us` before the step is launched, `output_us` after its tokens are out.
    """

    num_reqs: int
    schedule_us: tuple[float, ...]
    output_us: tuple[float, ...]


@dataclass(frozen=True)
class PartCost:
    """One part of a step: what it takes beside `share` of the sum of the operations.

    The device takes attention whole, and `share` of the others.
    `part` is "device" (what the device takes), "launch" (what the host takes to launch
    it), "before" (what of that passes before an idle device begins, and what passes
    after it is done), or, in the mode "any", "schedule" and "output" (`HostStep`).
    `mape` and `worst` are percent: each batch predicted by a fit to the others.
    """

    mode: StepMode | Literal["any"]
    part: Part
    share: float = 0.0
    step_us: float = 0.0
    layer_us: float = 0.0
    request_us: float = 0.0
    token_us: float = 0.0
    steps: int = 0
    mape: float = 0.0
    worst: float = 0.0


@dataclass(frozen=True)
class ClockStep:
    """One of many steps in a row, as the device ran it: how its clock gives way under load.

    `pattern` names the row, in which the step is number `place`; `begin_us` counts
    from the row's first step. Few layers make short steps, which show how quickly
    the clock follows.
    """

    num_layers: int
    pattern: str
    place: int
    tokens: int  # new tokens of the step
    begin_us: float
    device_us: float


@dataclass(frozen=True)
class RunConditions:
    """One run that measured: when, UTC, ISO 8601, and how device and host were meanwhile.

    `facts` are smallest, median and largest of what was read between captured
    steps (`profiling/watch.py` says what).
    """

    started_at: str
    ended_at: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class StepCost:
    """Step time beyond the operations: ``step + layer * layers + request * requests``."""

    step_us: float
    layer_us: float
    request_us: float

    def time_us(self, layers: int, requests: int) -> float:
        return self.step_us + self.layer_us * layers + self.request_us * requests


@dataclass(frozen=True)
class KvGroup:
    """Layers that share block tables: as many as `layers`, `page_bytes` a block in each."""

    kind: str  # the engine's name for it: "FullAttentionSpec", "SlidingWindowSpec"
    layers: int
    block_size: int  # tokens
    page_bytes: int
    sliding_window: int | None = None


@dataclass(frozen=True)
class KvCapacity:
    """What decides how many KV blocks the full model has on one rank; sizes are bytes.

    Blocks are the engine's: every group takes them from one pool.
    """

    block_bytes: int  # one block of the pool in all layers; 0 for a model without attention
    groups: tuple[KvGroup, ...]
    weight_bytes: int  # of the rank
    device_bytes: int  # all memory of the device
    max_num_batched_tokens: int  # of the step that activation_bytes are the peak of
    activation_bytes: int | None = None  # None where it was not measured
    other_bytes: int | None = None  # contexts, libraries, other processes

    def num_blocks(
        self, gpu_memory_utilization: float = 0.9, kv_cache_memory_bytes: int | None = None
    ) -> int:
        """Blocks of the pool, the engine's null block included, as vLLM counts them.

        Exact for an explicit `kv_cache_memory_bytes`. Otherwise the device's
        memory times `gpu_memory_utilization`, less weights, activations and the
        rest. What is not known (on a CPU: all but the weights) counts as
        nothing. Raises InputError when no block fits.
        """
        if not self.block_bytes:
            return 1
        available = kv_cache_memory_bytes
        if available is None:
            taken = self.weight_bytes + (self.activation_bytes or 0) + (self.other_bytes or 0)
            available = int(self.device_bytes * gpu_memory_utilization) - taken
        if available < self.block_bytes:
            raise InputError(
                f"no KV block fits: {available / 2**30:.2f} GiB are left, a block takes "
                f"{self.block_bytes / 2**20:.2f} MiB: raise the utilization, or divide the model"
            )
        return available // self.block_bytes
