"""KV capacities in a process of its own: one line of JSON a run, for test_kv_capacity.py.

    python capacity_elsewhere.py '{"model": "tiny", "hf_config": {...}, "layers": 3}' ...

Each line is what Dooly derives from the instance, and what vLLM has in this one.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from signatures_elsewhere import description

from dooly_backend.config import RunOptions
from dooly_backend.engines.vllm import VllmEngine

if __name__ == "__main__":
    for argument in sys.argv[1:]:
        settings = json.loads(argument)
        options = RunOptions(model=description(settings), **settings)
        with VllmEngine.boot(options) as engine:
            cache = engine._core.vllm_config.cache_config
            result = {
                "capacity": dataclasses.asdict(engine.kv_capacity()),
                "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
                "num_gpu_blocks": cache.num_gpu_blocks,
                "weights": sum(p.nbytes for p in engine._runner.model.parameters()),
            }
        sys.stdout.write(json.dumps(result) + "\n")
