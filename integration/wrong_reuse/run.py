"""Latencies of a model with its own attention, and with that of another one in its place.

    python -m integration.wrong_reuse.run --db h200.db [-o results/h200.json]
        [--forward ../additivity/results/h200/additivity-...csv]

Both models must have been profiled with the same backend into the database. By
default Command-R7B, three of whose four layers look back 4,096 tokens only, is
given the attention of Aya-Expanse-8B, which is alike in every number that a
planner compares (`profiling/planners.py`, HF-Model-Diff). Everything else stays
its own. With --forward the two are also held against the live forward passes of
an additivity run. Needs neither engine nor torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pandas as pd

from dooly_backend.database.records import Occurrence
from dooly_backend.errors import DoolyError, InputError
from dooly_backend.regression.bundle import BundleConfiguration
from dooly_backend.simulation.metrics import LATENCIES, Metrics
from dooly_backend.simulation.scheduler import simulate
from dooly_backend.simulation.source import Source, from_database
from dooly_backend.simulation.workload import load_workload
from dooly_backend.workload import Batch

#: The paper does not say which: its own workload, and prompts that reach beyond the window.
WORKLOADS = (
    "paper-small:requests=200,rate=1",
    "fixed:prompt=8192,output=64,requests=60,rate=0.5",
    "fixed:prompt=16384,output=64,requests=40,rate=0.25",
    "fixed:prompt=32768,output=64,requests=20,rate=0.08",
)


@click.command()
@click.option("--db", required=True)
@click.option("--model", default="CohereLabs/c4ai-command-r7b-12-2024", show_default=True)
@click.option("--donor", default="CohereLabs/aya-expanse-8b", show_default=True)
@click.option("--backend", default="FLASH_ATTN", show_default=True)
@click.option("--environment", help="Where the database holds several.")
@click.option("--mode", "execution_mode", help="Where a model was profiled in several.")
@click.option("--workload", "workloads", multiple=True, default=WORKLOADS, show_default=True)
@click.option("--kv-cache-memory", "gib", type=float, help="GiB, where the profile has none.")
@click.option("--forward", type=click.Path(exists=True, path_type=Path), help="Additivity's CSV.")
@click.option("--layers", default=4, show_default=True, help="That the forward passes had.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write them as JSON, too.")
def main(
    db: str,
    model: str,
    donor: str,
    backend: str,
    environment: str | None,
    execution_mode: str | None,
    workloads: tuple[str, ...],
    gib: float | None,
    forward: Path | None,
    layers: int,
    out: Path | None,
) -> None:
    """Compare MODEL with itself, given the attention of DONOR."""
    filters = {"backend": backend, "execution_mode": execution_mode}
    own = from_database(db, model, environment, filters)
    other = from_database(db, donor, environment, filters)
    wrong = replace(own, fitted=with_attention(own.fitted, other.fitted))
    found: dict[str, Any] = {
        **own.about(),
        "donor": other.configuration.model,
        "workloads": [compared(own, wrong, workload, gib) for workload in workloads],
    }
    if forward is not None:
        found["forward"] = forwards(own.fitted, wrong.fitted, pd.read_csv(forward), layers)
    text = json.dumps(found, indent=1)
    click.echo(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


def is_attention(occurrence: Occurrence) -> bool:
    return occurrence.signature.name == "Attention"


def with_attention(own: BundleConfiguration, donor: BundleConfiguration) -> BundleConfiguration:
    """`own` with every attention layer timed as the donor's.

    Raises InputError where the donor's layers are not all alike.
    """
    kinds = {o.signature.hash: o.signature for o in donor.occurrences if is_attention(o)}
    if len(kinds) != 1:
        raise InputError(
            f"{donor.configuration.model} has {len(kinds)} kinds of attention: the donor needs one"
        )
    (hash_, signature), *_ = kinds.items()
    occurrences = tuple(
        replace(o, signature=signature) if is_attention(o) else o for o in own.occurrences
    )
    return replace(own, occurrences=occurrences, fitted={**own.fitted, hash_: donor.fitted[hash_]})


def compared(own: Source, wrong: Source, workload: str, gib: float | None) -> dict[str, Any]:
    """Mean TTFT and TPOT of a workload with either attention, and by how much they differ.

    `extrapolated` is the percentage of steps beyond what was measured, of one or the other.
    """
    requests = load_workload(workload).build()
    limits = own.limits({"kv_cache_gib": gib})
    summaries = [
        Metrics(simulate(requests, limits, source.timer(limits))).summary for source in (own, wrong)
    ]
    right, other = (summary.latencies for summary in summaries)
    beyond = max(100 * (summary.extrapolated_share or 0.0) for summary in summaries)
    row: dict[str, Any] = {"workload": workload, "extrapolated": round(beyond, 1)}
    row |= {"error": {}, "errors": {}}
    for name in ("ttft", "tpot"):
        a, b = right[name], other[name]
        if a is None or b is None:
            raise InputError(f"no request of {workload} has a {name}")
        row[f"own_{LATENCIES[name]}"], row[f"wrong_{LATENCIES[name]}"] = a.mean, b.mean
        errors = {
            at: round(percent(getattr(b, at), getattr(a, at)), 2)
            for at in ("mean", "p50", "p90", "p99")
        }
        row["error"][name], row["errors"][name] = errors["mean"], errors
    return row


def forwards(
    own: BundleConfiguration, wrong: BundleConfiguration, rows: pd.DataFrame, layers: int
) -> list[dict[str, Any]]:
    """Live forward passes of the first `layers` layers beside both predictions."""
    found = []
    for batch, live_us in zip(rows["batch"], rows["forward_live_us"], strict=True):
        right, other = (forward_us(each, Batch.parse(batch), layers) for each in (own, wrong))
        found.append(
            {
                "batch": batch,
                "live_us": round(float(live_us), 1),
                "own_us": round(right, 1),
                "wrong_us": round(other, 1),
                "own_error": round(percent(right, live_us), 2),
                "wrong_error": round(percent(other, live_us), 2),
            }
        )
    return found


def forward_us(fitted: BundleConfiguration, batch: Batch, layers: int) -> float:
    """The model's operations in its first `layers` layers, without logits and sampler."""
    times = {hash_: float(p.us[0]) for hash_, p in fitted.predict_all([batch]).items()}
    inside = (o for o in fitted.occurrences if o.path.startswith("model"))
    return sum(times[o.signature.hash] * calls(o, layers) for o in inside)


def calls(occurrence: Occurrence, layers: int) -> float:
    """How often the first `layers` layers run it."""
    of: Sequence[int] = occurrence.layers
    if not of:
        return float(occurrence.count)
    return occurrence.count * sum(layer < layers for layer in of) / len(of)


def percent(value: float, truth: float) -> float:
    return 100 * (value / truth - 1)


if __name__ == "__main__":
    try:
        main()
    except DoolyError as error:
        sys.exit(f"error: {error}")
