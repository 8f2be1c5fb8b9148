"""Signatures of models in a process of its own: one line of JSON a model, for the tests.

    python signatures_elsewhere.py '{"model": "smollm-135m", "layers": 2}' ...

Each argument is a JSON object of run options; "hf_config" replaces the model's
configuration by one of the caller's, "overrides" some of its values.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from dooly_backend.config import ModelDescription, RunOptions, load_model
from dooly_backend.engines import boot
from dooly_backend.operations.callgraph import signatures
from dooly_backend.operations.runnable import resolve
from dooly_backend.tracing.tracer import trace_model


def signed(options: RunOptions) -> list[list[Any]]:
    """[path, hash, canonical, found stateful, stateful by the registry] of every entry."""
    with boot(options) as engine:
        trace = trace_model(engine)
        found = signatures(trace, resolve(trace, engine), engine)
        return [
            [entry.path, s.hash, s.canonical, entry.stateful, entry.path in engine.stateful]
            for entry, s in found.items()
        ]


def description(settings: dict[str, Any]) -> ModelDescription:
    config = settings.pop("hf_config", None)
    name = settings.pop("model")
    if config is None:
        config = load_model(name).hf_config | settings.pop("overrides", {})
    return ModelDescription(name=name, hf_config=config)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        settings = json.loads(argument)
        result = signed(RunOptions(model=description(settings), **settings))
        sys.stdout.write(json.dumps(result) + "\n")
