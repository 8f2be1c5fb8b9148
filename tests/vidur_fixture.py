"""A FIXTURE, not a measurement: a database whose times come from formulas.

The formulas follow how a small model behaves on two CPU threads: a fixed part
per call, weights to read, work per token, attention over the KV cache. They
let tests know every time exactly.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
from dataclasses import dataclass, replace
from pathlib import Path

from dooly_backend.database import Database
from dooly_backend.database.records import (
    Configuration,
    Environment,
    Measurement,
    Occurrence,
    Signature,
    StepCost,
)
from dooly_backend.regression.latency import LatencyModel
from dooly_backend.workload import Batch, PointKind, WorkloadPoint

LAYERS = 30
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REQUESTS = (1, 2, 4, 8, 16)
CHUNKS = (16, 32, 64, 128, 256, 512)
HISTORIES = (0, 128, 256, 512)
SIZES = (1, 2, 4, 8, 16)
CONTEXTS = (16, 64, 128, 256, 512, 1023)

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 1024,
}
ENVIRONMENT = Environment("Fixture CPU", "cpu", "vllm", "0.0-fixture", {"fixture": True})
STEP_COST = StepCost(step_us=900.0, layer_us=25.0, request_us=40.0)


@dataclass(frozen=True)
class Operation:
    """One occurrence: `fixed` microseconds per call and `each` per token or request.

    `divided` over the ranks of tensor parallelism, unlike what every rank does in full.
    `experts` and `top_k` of a mixture-of-experts layer: `each_expert` that fires costs, too.
    """

    path: str
    name: str
    kind: PointKind
    fixed: float
    each: float = 0.0
    per_layer: bool = True
    divided: bool = True
    experts: int = 0
    top_k: int = 0
    each_expert: float = 0.0

    def time_us(self, batch: Batch) -> float:
        if self.kind == "batch":
            prefill = sum(
                r.query * (1.5 + 0.004 * (r.context + r.query / 2)) for r in batch.prefills
            )
            decode = sum(6 + 0.05 * r.context for r in batch.decodes)
            return self.fixed + prefill + decode
        amount = {"requests": batch.num_reqs, "constant": 0}.get(self.kind, batch.num_tokens)
        return self.fixed + self.each * amount

    def routed_us(self, tokens: int, fired: int) -> float:
        """Of a mixture-of-experts layer; the more experts share the tokens, the better."""
        return self.fixed + self.each_expert * fired + self.each * tokens * (1 + 1 / fired)


_LAYER = "model.layers.*"
OPERATIONS = (
    Operation("model.embed_tokens", "VocabParallelEmbedding", "tokens", 30, 0.4, per_layer=False),
    Operation(f"{_LAYER}.input_layernorm", "RMSNorm", "tokens", 9, 0.3),
    Operation(f"{_LAYER}.self_attn.qkv_proj", "QKVParallelLinear", "tokens", 60, 3.1),
    Operation(f"{_LAYER}.self_attn.q_norm", "RMSNorm", "tokens", 7, 0.2),
    Operation(f"{_LAYER}.self_attn", "aten::split_with_sizes", "tokens", 4),
    Operation(f"{_LAYER}.self_attn.rotary_emb", "RotaryEmbedding", "tokens", 14, 0.6),
    Operation(f"{_LAYER}.self_attn.attn", "Attention", "batch", 35),
    Operation(f"{_LAYER}.self_attn.o_proj", "RowParallelLinear", "tokens", 42, 2.2),
    Operation(f"{_LAYER}.post_attention_layernorm", "RMSNorm", "tokens", 9.5, 0.31),
    Operation(f"{_LAYER}.mlp.gate_up_proj", "MergedColumnParallelLinear", "tokens", 150, 9.0),
    Operation(f"{_LAYER}.mlp.act_fn", "SiluAndMul", "tokens", 11, 0.7),
    Operation(f"{_LAYER}.mlp.down_proj", "RowParallelLinear", "tokens", 90, 4.6),
    Operation(_LAYER, "aten::add.Tensor", "tokens", 5, 0.1),
    Operation("model.norm", "RMSNorm", "tokens", 9.2, 0.3, per_layer=False),
    Operation("", "aten::index.Tensor", "requests", 6, 0.2, per_layer=False),
    Operation("logits_processor", "LogitsProcessor", "requests", 2600, 210, per_layer=False),
    Operation("sampler", "Sampler", "requests", 480, 160, per_layer=False),
    Operation("", "aten::zeros", "constant", 3, per_layer=False),
)


def configuration(tensor_parallel: int = 1) -> Configuration:
    return Configuration(
        model="fixture/SmolLM-135M",
        hf_config=HF_CONFIG,
        engine="vllm",
        backend="CPU_ATTN",
        dtype="bfloat16",
        kv_cache_dtype="auto",
        block_size=32,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=1,
        execution_mode="eager",
        num_layers=LAYERS,
        facts={
            "head_dim": 64,
            "max_model_len": 1024,
            "vocab_size": 49152,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 16,
        },
    )


def fixture_model(
    path: Path,
    operations: tuple[Operation, ...] = OPERATIONS,
    tensor_parallel: int = 1,
    config: Configuration | None = None,
) -> LatencyModel:
    """A latency model of `operations`, through a real database at `path`."""
    config = config or configuration(tensor_parallel)
    tensor_parallel = config.tensor_parallel
    occurrences = [
        _occurrence(position, operation, config) for position, operation in enumerate(operations)
    ]
    with Database.open(path, create=True) as database:
        environment_id = database.add_environment(ENVIRONMENT)
        configuration_id = database.add_configuration(config, occurrences)
        for operation, occurrence in zip(operations, occurrences, strict=True):
            ranks = tensor_parallel if operation.divided else 1
            for point, us in _measured(operation):
                database.record(
                    occurrence.signature,
                    environment_id,
                    Measurement(point, _samples(us / ranks)),
                    configuration_id,
                )
        database.set_step_cost(configuration_id, environment_id, STEP_COST)
        return LatencyModel.load(database, config.model, tensor_parallel=config.tensor_parallel)


def with_experts(operations: tuple[Operation, ...] = OPERATIONS) -> tuple[Operation, ...]:
    """The same model with experts in place of its feed-forward projections."""
    kept = tuple(o for o in operations if ".mlp." not in o.path)
    return (
        *kept,
        Operation(f"{_LAYER}.mlp.gate", "ReplicatedLinear", "tokens", 12, 0.2),
        Operation(f"{_LAYER}.mlp.experts", "FusedMoE", "tokens", 240, 12.0),
    )


def with_all_reduce(operations: tuple[Operation, ...] = OPERATIONS) -> tuple[Operation, ...]:
    """The same model with a collective after each of a layer's two last projections."""
    collective = Operation(_LAYER, "vllm::all_reduce", "tokens", 30, 0.05)
    return (*operations, collective, replace(collective, path=f"{_LAYER}.mlp.down_proj"))


def _occurrence(position: int, operation: Operation, config: Configuration) -> Occurrence:
    ranks = config.tensor_parallel if operation.divided else 1
    canonical = f"fixture {position} {operation} tp{ranks}"
    if operation.kind == "routing":
        routing = {"experts": operation.experts, "top_k": operation.top_k}
        canonical = json.dumps({"fixture": canonical, "routing": routing})
    is_module = "::" not in operation.name
    return Occurrence(
        position=position,
        path=operation.path,
        module_class=operation.name if is_module else "Module",
        signature=Signature(
            operation.name, "module" if is_module else "operation", operation.kind, canonical
        ),
        count=config.num_layers if operation.per_layer else 1,
        layers=tuple(range(config.num_layers)) if operation.per_layer else (),
    )


def _measured(operation: Operation) -> list[tuple[WorkloadPoint, float]]:
    if operation.kind == "routing":
        return [
            (
                WorkloadPoint("routing", num_tokens=n, num_experts=fired),
                operation.routed_us(n, fired),
            )
            for n in TOKENS
            for fired in _fired(operation, n)
        ]
    return [(point, operation.time_us(batch)) for point, batch in _points(operation.kind)]


def _fired(operation: Operation, tokens: int) -> list[int]:
    """Numbers of experts that a sweep makes fire."""
    most = min(operation.experts, tokens * operation.top_k)
    powers = (2**n for n in range(12))
    return sorted({operation.top_k, most, *(n for n in powers if operation.top_k < n < most)})


def _points(kind: PointKind) -> list[tuple[WorkloadPoint, Batch]]:
    batches = {
        "tokens": [Batch.prefill(n) for n in TOKENS],
        "requests": [Batch.decode(n, 16) for n in REQUESTS],
        "constant": [Batch.prefill(16)],
        "batch": [
            *(Batch.prefill(c, h) for c in CHUNKS for h in HISTORIES),
            *(Batch.decode(n, c) for n in SIZES for c in CONTEXTS),
        ],
    }[kind]
    return [(WorkloadPoint.of(kind, batch), batch) for batch in batches]


def _samples(middle: float) -> tuple[float, ...]:
    """Nine samples whose median is `middle`, with a tail as timings have."""
    return tuple(middle * f for f in (0.97, 0.98, 0.99, 0.995, 1.0, 1.01, 1.02, 1.05, 1.2))


def double_times(export: Path) -> None:
    """Multiply every time in the export's tables by two, in place."""
    tables = [*export.rglob("*.csv"), *export.rglob("*.csv.xz")]
    for path in tables:
        packed = path.suffix == ".xz"
        data = lzma.decompress(path.read_bytes()) if packed else path.read_bytes()
        header, *rows = csv.reader(io.StringIO(data.decode()))
        times = [i for i, column in enumerate(header) if column.startswith("time_stats.")]
        for row in rows:
            for index in times:
                row[index] = repr(2 * float(row[index]))
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        data = text.getvalue().encode()
        path.write_bytes(lzma.compress(data) if packed else data)
