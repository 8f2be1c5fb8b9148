"""Runs of live vLLM for tests/test_live_schedules.py, in a process of their own.

    python tests/live_schedules.py FOLDER

One file per run: SETTINGS-WORKLOAD.json.gz.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from dooly_backend.config import ModelDescription
from dooly_backend.engines.serving import ServingOptions, boot_server
from dooly_backend.simulation import live
from dooly_backend.simulation.records import ServingRequest
from dooly_backend.simulation.run_file import save_run

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}
#: Gemma 2: layers with a window and without take turns, a KV cache group each.
WINDOWS = MODEL | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "num_hidden_layers": 2,
    "sliding_window": 64,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
#: What every engine has: few blocks, so that requests lose theirs.
COMMON: dict[str, Any] = {
    "threads": 1,
    "eager": True,
    "block_size": 32,
    "max_model_len": 256,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 8,
    "num_gpu_blocks": 20,
    "kv_cache_gib": 0.1,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {"async_scheduling": False},
    "async": {"async_scheduling": True},
    "priority": {"async_scheduling": True, "policy": "priority"},
    "windows": {"async_scheduling": True, "num_gpu_blocks": 34},
    "unlike": {
        "async_scheduling": False,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 256,
        "long_prefill_token_threshold": 64,
    },
}


def requests(seed: int, spread: float, prefixes: int) -> list[ServingRequest]:
    """Twenty requests that arrive over `spread` steps or seconds."""
    rng = random.Random(seed)
    made = []
    for identity in range(20):
        prompt = rng.randint(30, 150)
        prefix = rng.randrange(prefixes) if prefixes else None
        made.append(
            ServingRequest(
                identity,
                float(int(rng.random() * spread)) if spread > 1 else rng.random() * spread,
                prompt,
                rng.randint(1, 60),
                prefix,
                min(prompt, 70) if prefixes else 0,
                rng.randrange(3),
            )
        )
    return made


#: By step but for the last, which comes by the clock.
WORKLOADS = {
    "burst": requests(1, 0.0, 0),
    "staggered": requests(2, 150.0, 2),
    "clock": requests(3, 0.4, 2),
}


def main() -> None:
    folder = Path(sys.argv[1])
    for name, settings in SETTINGS.items():
        hf_config = WINDOWS if name == "windows" else MODEL
        model = ModelDescription(name="tiny", hf_config=hf_config)
        with boot_server(ServingOptions(model, **{**COMMON, **settings})) as server:
            for workload, served in WORKLOADS.items():
                run = live.serve(server, served, by_step=workload != "clock")
                save_run(run, folder / f"{name}-{workload}.json.gz")


if __name__ == "__main__":
    main()
