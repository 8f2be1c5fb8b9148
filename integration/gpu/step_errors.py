"""How far predicted steps are from measured ones that no fit has seen.

    python -m integration.gpu.step_errors --db h200.db -o results/step-errors.csv steps-*.jsonl

The files are those of `integration.gpu.steps` and `integration.gpu.step_costs`:
steps in a row of `steps.BATCHES`, which are held out. A prediction is the slower
of device and launch, as the simulator takes a long stream of equal steps; beside
it stands the sum of the operations alone. Needs no engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd

from dooly_backend.config import load_model
from dooly_backend.database import Database
from dooly_backend.database.records import StreamStep
from dooly_backend.regression.bundle import BundleConfiguration
from dooly_backend.regression.bundle_fit import fit_bundle
from dooly_backend.regression.step_operations import Operations, step_operations
from dooly_backend.simulation.execution import OF_CONFIGURATION, Execution, Mode, capture_sizes
from dooly_backend.simulation.own_cost import MODE_NAMES, Shapes, own_cost
from dooly_backend.workload import Batch
from integration.gpu.steps import read_rows


@dataclass(frozen=True)
class Served:
    """What tells the configuration of a row."""

    model: str
    backend: str
    mode: str
    quantization: str
    kv_cache_dtype: str

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Served:
        return cls(
            load_model(row["model"]).name,
            row["backend"],
            row["mode"],
            row.get("quantization") or "none",
            row.get("kv_cache_dtype") or "auto",
        )


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--db", required=True)
@click.option("--environment", help="Where the database holds several.")
@click.option("--max-num-seqs", default=256, show_default=True, help="Of the measured engines.")
@click.option("--max-num-batched-tokens", default=8192, show_default=True)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Every step, as CSV.")
def main(
    files: tuple[Path, ...],
    db: str,
    environment: str | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    out: Path | None,
) -> None:
    """Print errors by kind of batch and by mode; write every step."""
    rows = read_rows(files)
    found: dict[Served, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[Served.of(row)].append(row)
    tables = []
    with Database.open(db, read_only=True) as database:
        for served, measured in found.items():
            bundle = fit_bundle(database, [digest_of(database, served)], environment)
            version = bundle.environment.engine_version
            rule = rule_of(served.mode, max_num_seqs, max_num_batched_tokens, version)
            tables.append(compared(served, bundle.configurations[0], rule, measured))
    steps = pd.concat(tables, ignore_index=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        steps.round(1).to_csv(out, index=False)
    with pd.option_context("display.width", 160, "display.max_columns", 20):
        click.echo(summary(steps).round(1).to_string())


def digest_of(database: Database, served: Served) -> str:
    """The one configuration that the database has of `served`. Raises ClickException for none."""
    chosen = [
        configuration.digest
        for configuration in database.configurations().values()
        if served
        == Served(
            configuration.model,
            configuration.backend,
            configuration.execution_mode,
            configuration.quantization,
            configuration.kv_cache_dtype,
        )
    ]
    if len(chosen) != 1:
        raise click.ClickException(f"{database.path} has {len(chosen)} profiles of {served}")
    return chosen[0]


def rule_of(
    mode: str, max_num_seqs: int, max_num_batched_tokens: int, engine_version: str
) -> Execution:
    """How an engine with such limits runs its steps."""
    graphs = OF_CONFIGURATION[mode]
    sizes = capture_sizes(max_num_seqs, max_num_batched_tokens, engine_version)
    return Execution(graphs, sizes if graphs != "NONE" else (), max_num_seqs)


def compared(
    served: Served,
    fitted: BundleConfiguration,
    rule: Execution,
    measured: Sequence[Mapping[str, Any]],
) -> pd.DataFrame:
    """One row per batch and depth: the median over its rounds, and what is predicted."""
    by_step: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in measured:
        by_step[row["layers"], row["batch"]].append(row)
    steps = [_step(rule, depth, batch, rows) for (depth, batch), rows in by_step.items()]
    sums = step_operations(fitted.configuration, fitted.occurrences, fitted.predictors, steps)
    found = []
    for step, operations in zip(steps, sums, strict=True):
        device_us, launch_us = predicted(fitted, step, operations)
        predicted_us = max(device_us, launch_us)
        found.append(
            {
                "model": served.model,
                "backend": served.backend,
                "execution_mode": served.mode,
                "quantization": served.quantization,
                "kv_cache_dtype": served.kv_cache_dtype,
                "layers": step.num_layers,
                "batch": step.batch.key,
                "kind": kind_of(step.batch),
                "step_mode": step.mode,
                "requests": step.batch.num_reqs,
                "tokens": step.batch.num_tokens,
                "measured_us": step.median_us,
                "measured_launch_us": step.launch_median_us,
                "operations_us": operations.us,
                "device_us": device_us,
                "launch_us": launch_us,
                "predicted_us": predicted_us,
                "error_percent": (predicted_us / step.median_us - 1) * 100,
                "forward_only_error_percent": (operations.us / step.median_us - 1) * 100,
            }
        )
    return pd.DataFrame(found)


def predicted(
    fitted: BundleConfiguration, step: StreamStep, operations: Operations
) -> tuple[float, float]:
    """What device and host take for one of many equal steps; the slower one decides."""
    one = np.ones(1, np.int64)
    mode = next(mode for mode, name in MODE_NAMES.items() if name == step.mode)
    shapes = Shapes(
        one * step.batch.num_tokens,
        one * step.padded_tokens,
        one * step.batch.num_reqs,
        np.full(1, mode, np.int8),
    )
    launching = [part for part in fitted.stream_cost if part.mode != "any"]
    own = own_cost(fitted.step_cost, step.num_layers, launching).of(shapes)
    device = own.device_us(np.array([operations.us]), operations.attention_us)
    return float(device[0]), float(own.host_us[0] + own.launch_us[0])


def _step(rule: Execution, depth: int, batch: str, rows: Iterable[Mapping[str, Any]]) -> StreamStep:
    parsed = Batch.parse(batch)
    longest = max(request.query for request in parsed.requests)
    numbers = (np.array([n]) for n in (parsed.num_tokens, parsed.num_reqs, longest))
    modes, padded = rule.modes(*numbers)
    rows = list(rows)
    return StreamStep(
        parsed,
        depth,
        MODE_NAMES[Mode(modes[0])],
        int(padded[0]),
        tuple(row["interval_us"] for row in rows),
        tuple(row["launch_us"] for row in rows),
    )


def kind_of(batch: Batch) -> str:
    if batch.decodes and batch.prefills:
        return "mixed"
    return "decode" if batch.decodes else "prefill"


def summary(steps: pd.DataFrame) -> pd.DataFrame:
    """Mean and worst absolute error, percent, by configuration, depth, kind and mode."""
    by = ["model", "backend", "execution_mode", "layers", "kind", "step_mode"]
    table = steps.assign(
        error=steps["error_percent"].abs(), forward=steps["forward_only_error_percent"].abs()
    )
    return table.groupby(by).agg(
        steps=("batch", "size"),
        mape=("error", "mean"),
        worst=("error", "max"),
        forward_only_mape=("forward", "mean"),
        forward_only_worst=("forward", "max"),
    )


if __name__ == "__main__":
    main()
