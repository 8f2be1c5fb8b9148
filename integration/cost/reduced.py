"""Small models with the shapes of large ones, for hosts that cannot hold those.

    python -m integration.cost.reduced OUT [NAME ...]

Writes OUT/NAME/config.json for the models of the corpora (or those whose names contain
one of NAMES): widths a quarter, vocabularies a sixteenth; heads keep their size, and
experts their number. What two models share, their small ones share, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from dooly_backend.config import load_model
from integration.corpus.corpora import find

NARROWER = 4
FEWER_TOKENS = 16
WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size",
    "shared_expert_intermediate_size", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip


def reduced(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the small model."""
    found = dict(config)
    if "num_key_value_heads" not in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    if "kv_lora_rank" not in found:  # it has head sizes of its own
        width = int(found["hidden_size"]) // int(found["num_attention_heads"])
        found["head_dim"] = int(found.get("head_dim") or width)
    for name in WIDTHS:
        if found.get(name):
            found[name] = max(1, int(found[name]) // NARROWER)
    for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(found.get(name), int):
            found[name] //= FEWER_TOKENS
    return found


@click.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.argument("names", nargs=-1)
def main(out: Path, names: tuple[str, ...]) -> None:
    """Write the small models' configs into OUT."""
    for case in find(list(names)):
        folder = out / case.name
        folder.mkdir(parents=True, exist_ok=True)
        config = reduced(load_model(case.model).hf_config)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        click.echo(folder)


if __name__ == "__main__":
    main()
