"""Mixture-of-experts layers of two models at the same points, and their gates.

    python -m integration.cost.moe run deepseek-ai/DeepSeek-V2-Lite:auto \
        deepseek-ai/deepseek-moe-16b-base:FLASH_ATTN -o integration/cost/results/h200
    python -m integration.cost.moe table -o integration/cost/results/h200     # no engine

The paper's appendix J.2. A database would keep one measurement of a signature that two
models share; here each model's own layer is measured at the points of Table 12, with
the same signature or not, and twice from start to end, so that what two models differ by
stands beside what one model differs from itself. Gates get inputs drawn at random, in
turns, and one of them several times: what only noise tells apart. A process for each
model and time; they start together and measure in turn. Writes moe-MODEL-PASS.json, then
moe.md, moe.csv and gates.csv.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dooly_backend.config import RunOptions, load_model
from dooly_backend.errors import DoolyError, InputError
from dooly_backend.workload import WorkloadPoint
from integration.accuracy.tables import paragraph, table
from integration.gpu.run import AUTO
from integration.gpu.workers import in_turn, ready

#: (tokens, experts that fire) of the paper's Table 12, and its milliseconds on an A100.
TABLE_12 = {
    (512, 16): (0.57, 0.57, 0.5), (512, 64): (0.95, 0.94, 0.4),
    (1024, 16): (1.01, 1.00, 0.2), (2048, 64): (2.38, 2.39, 0.2),
}  # fmt: skip
GATE_TOKENS = (16, 512, 2048)
PASSES = 2
INPUTS, SAME = 8, 8  # random inputs of a gate, and how often one of them is repeated
_ABSENT = object()
#: Beside the profiler's own: differences of half a percent are looked for.
REPEATS = 21


@click.group()
def cli() -> None:
    """FusedMoE and gate latencies of several models."""


@cli.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL:BACKEND...")
@click.option("--budget", default=300.0, show_default=True, help="Seconds for everything.")
@click.option("--repeats", default=REPEATS, show_default=True, help="Samples of a point.")
@click.option("--layers", type=int, help="Default: as few as show every kind.")
@click.option("--mode", default="eager", show_default=True)
@click.option("--threads", type=int, help="Of a CPU engine.")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
def run(models: tuple[str, ...], budget: float, out: Path, **settings: Any) -> None:
    """Measure MODELS, each in two passes, and write the tables."""
    out.mkdir(parents=True, exist_ok=True)
    options = ["--out", str(out)]
    for name, value in settings.items():
        options += [] if value is None else [f"--{name}", str(value)]
    commands = [
        ["integration.cost.moe", "one", *model.rsplit(":", 1), str(n), *options]
        for n in range(PASSES)
        for model in models
    ]
    codes = in_turn(commands, budget)
    click.echo(write(out))
    if any(codes):
        sys.exit(f"exit codes, pass by pass: {codes}")


@cli.command(name="table")
@click.option("-o", "--out", required=True, type=click.Path(exists=True, path_type=Path))
def table_command(out: Path) -> None:
    """Write the tables from what was measured."""
    click.echo(write(out))


@cli.command()
@click.argument("model")
@click.argument("backend")
@click.argument("number", type=int, metavar="PASS")
@click.option("--repeats", type=int, default=REPEATS)
@click.option("--layers", type=int)
@click.option("--mode", default="eager")
@click.option("--threads", type=int)
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path))
def one(
    model: str,
    backend: str,
    number: int,
    repeats: int,
    layers: int | None,
    mode: Any,
    threads: int | None,
    out: Path,
) -> None:
    """One pass of one model."""
    from dooly_backend.engines import boot
    from dooly_backend.profiling.measure import Regime
    from integration.cost.moe_layers import measure_experts, measure_gates

    options = RunOptions(
        model=load_model(model),
        backend=None if backend == AUTO else backend,
        layers=layers,
        execution_mode=mode,
        threads=threads,
    )
    with boot(options) as engine:
        ready()
        regime = Regime(repeats=repeats)
        about = {
            "model": options.model.name.rpartition("/")[2],
            "backend": engine.configuration.backend,
            "pass": number,
            "device": engine.environment.device,
            "engine": f"{engine.environment.engine} {engine.environment.engine_version}",
            "mode": mode,
        }
        found = {
            **about,
            **measure_experts(engine, regime, TABLE_12),
            "gates": measure_gates(engine, regime, GATE_TOKENS, INPUTS, SAME),
        }
    path = out / f"moe-{about['model']}-{number}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    click.echo(json.dumps({**about, "points": len(found["points"])}))


# -- tables ----------------------------------------------------------------------


def write(out: Path) -> str:
    """The tables of the passes in `out`. Raises InputError where there are none."""
    passes = [json.loads(path.read_text()) for path in sorted(out.glob("moe-*.json"))]
    if not passes:
        raise InputError(f"nothing was measured into {out}: use run first")
    experts, gates = expert_rows(passes), gate_rows(passes)
    for name, rows in (("moe", experts), ("gates", gates)):
        with (out / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    text = markdown(passes, experts, gates)
    (out / "moe.md").write_text(text)
    return text


def expert_rows(passes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for every point: each model's time, what models and what passes differ by.

    A model's time is the mean of its passes' medians; differences are percent of
    the smaller of two.
    """
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for one_pass in passes:
        by_model.setdefault(one_pass["model"], []).append(one_pass)
    rows = []
    for key in dict.fromkeys(key for one_pass in passes for key in one_pass["points"]):
        times = {
            model: [us for p in of_model if (us := p["points"][key].get("median_us")) is not None]
            for model, of_model in by_model.items()
        }
        point = WorkloadPoint.parse(key)
        place = point.num_tokens, point.num_experts
        row: dict[str, Any] = {"tokens": place[0], "experts": place[1]}
        row |= {f"{m}_us": round(statistics.fmean(t), 1) if t else "" for m, t in times.items()}
        means = [statistics.fmean(t) for t in times.values() if t]
        row["models_differ_percent"] = apart(means)
        own = [apart(t) for t in times.values() if len(t) > 1]
        row["passes_differ_percent"] = max((d for d in own if d != ""), default="")
        row["paper_differ_percent"] = TABLE_12.get(place, ("",) * 3)[2]
        rows.append(row)
    return rows


def gate_rows(passes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for every gate measured: how far random inputs are apart, and one input from itself."""
    return [
        {
            "model": one_pass["model"],
            "pass": one_pass["pass"],
            "tokens": gate["tokens"],
            "us": round(statistics.median(gate["inputs_us"]), 2),
            "inputs_differ_percent": apart(gate["inputs_us"]),
            "same_input_differs_percent": apart(gate["same_us"]),
        }
        for one_pass in passes
        for gate in one_pass["gates"]
    ]


def apart(times: Iterable[float]) -> Any:
    """Largest over smallest of them, less one, in percent; nothing for a single one."""
    times = list(times)
    return round(100 * (max(times) / min(times) - 1), 2) if len(times) > 1 else ""


def told_apart_by(passes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on what the first model's signature and every other's do not have in common."""
    models = {p["model"]: p["canonical"] for p in passes if "canonical" in p}
    first = next(iter(models), "")
    sentences = []
    for model, canonical in models.items():
        sentences += [
            f"`{path}` is {mine} in {first}, {its} in {model}."
            for path, (mine, its) in differing(models[first], canonical).items()
        ]
    return sentences


def differing(one: Any, other: Any, path: str = "") -> dict[str, tuple[str, str]]:
    """The places where two nested values differ, with both values as JSON ("nothing" if absent)."""
    if type(one) is type(other) and isinstance(one, dict):
        pairs = [(str(key), one.get(key, _ABSENT), other.get(key, _ABSENT)) for key in one | other]
    elif type(one) is type(other) and isinstance(one, list) and len(one) == len(other):
        pairs = [(str(i), *values) for i, values in enumerate(zip(one, other, strict=True))]
    else:
        return {} if one == other else {path: (_shown(one), _shown(other))}
    found: dict[str, tuple[str, str]] = {}
    for name, mine, its in pairs:
        found |= differing(mine, its, f"{path}.{name}" if path else name)
    return found


def _shown(value: Any) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value)


def markdown(
    passes: Sequence[Mapping[str, Any]],
    experts: Sequence[Mapping[str, Any]],
    gates: Sequence[Mapping[str, Any]],
) -> str:
    """The page."""
    signatures = {(p["model"], p["signature"]) for p in passes}
    shared = len({hash_ for _, hash_ in signatures}) < len({model for model, _ in signatures})
    pieces = [
        f"{passes[0]['device']}, {passes[0]['engine']}.",
        "The models' layers have one signature." if shared else "Signatures differ.",
        *told_apart_by(passes),
        "Every model was measured from its own layer, in passes that are processes of their own;",
        "*passes differ* is the most that one model differs from itself. The paper's Table 12",
        "(A100): at most 0.5 %; its gates: at most 1.4 % over random inputs.",
    ]
    reasons = sorted(
        {point["reason"] for p in passes for point in p["points"].values() if "reason" in point}
    )
    if reasons:
        pieces.append(f"Not measured: {'; '.join(reasons)}.")
    lines = ["# Mixture of experts", "", paragraph(*pieces), ""]
    for rows in (experts, gates):
        heads = [name.replace("_", " ") for name in rows[0]]
        lines += [*table(heads, [[str(value) for value in row.values()] for row in rows]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        cli()
    except DoolyError as error:
        sys.exit(f"error: {error}")
