"""What LLMServingSim's own code makes of measured models: a table of results.

    python -m integration.llmservingsim.table [--checkout DIR] [-o lookups.md]

Models are those of tests/data/cpu.db (two dense ones and one with experts, at
tensor parallel 1 and 2) and Llama-3.1-8B of builtin:h200. For each the export
is loaded by the simulator's loader; its look-ups, at measured places and
between them, and its traces of random steps are compared with the database.
"""

from __future__ import annotations

import itertools
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from dooly_backend import console
from dooly_backend.database import Database
from dooly_backend.errors import CheckFailed
from dooly_backend.exporters import get_exporter
from dooly_backend.regression.latency import LatencyModel
from integration.llmservingsim import run
from integration.packed import unpacked
from shims.common import random_batches
from shims.llmservingsim.architecture import architecture_of
from shims.llmservingsim.costs import LayerCosts
from shims.llmservingsim.mapping import TP_STABLE
from shims.llmservingsim.routing import Routing, expert_parallelism
from shims.llmservingsim.tables import carrier
from shims.times import Axes, axes_of

CPU = unpacked(Path(__file__).resolve().parents[2] / "tests" / "data" / "cpu.db")
MODELS = (
    (str(CPU), "small-llama", (1, 2)),
    (str(CPU), "small-qwen3", (1, 2)),
    (str(CPU), "small-mixtral", (1, 2)),
    ("builtin:h200", "meta-llama/Llama-3.1-8B", (1,)),
)
BACKENDS = {"builtin:h200": "FLASH_ATTN"}
LIMIT_PERCENT = 1.0
STEPS = 30


@dataclass(frozen=True)
class Question:
    """A look-up, the database's microseconds for it, and whether it was measured there."""

    lookup: run.Lookup
    us: float
    on_grid: bool


@dataclass(frozen=True)
class Row:
    """Worst deviations are in percent."""

    model: str
    degree: int
    layers: int
    missing: tuple[str, ...]
    rows: int
    expected_rows: int
    lookups: tuple[int, int]  # on the grid, off it
    worst: tuple[float, float]
    steps: int
    worst_step: float

    @property
    def fine(self) -> bool:
        within = max(*self.worst, self.worst_step) <= LIMIT_PERCENT
        return within and not self.missing and self.rows == self.expected_rows


def questions(costs: LayerCosts, first: LayerCosts, axes: Axes) -> list[Question]:
    """Look-ups of every layer, at measured places and in the middle between two."""
    architecture = costs.architecture
    # Where degrees differ these also hold the difference: it is in the sum of a step.
    held_elsewhere = {"embedding"}
    if costs.degree > 1:
        held_elsewhere.add(carrier(architecture))
    found = []
    for layer in architecture.dense_layers:
        if layer in held_elsewhere:
            continue
        read = first if layer in TP_STABLE else costs
        for tokens, measured in places(axes.tokens):
            us = read.dense(layer, tokens).us
            found.append(Question(("dense", [layer, tokens]), us, measured))
    if costs.degree == 1:
        for number, measured in places(axes.requests):
            us = costs.lm_head(number).us
            found.append(Question(("per_sequence", ["lm_head", number]), us, measured))
    for chunk, measured in places(axes.chunks):
        for history in (0, axes.histories[-1] // 3):
            where = (chunk, history, 0, 0)
            us = costs.attention(*where).us
            on_grid = measured and history == 0
            found.append(Question(("attention", list(where)), us, on_grid))
    for size, measured in places(axes.sizes):
        for context, also in places(axes.contexts):
            where = (0, 0, size, context)
            us = costs.attention(*where).us
            found.append(Question(("attention", list(where)), us, measured and also))
    if architecture.experts:
        experts, each = architecture.experts, architecture.experts_per_token
        routing = Routing(experts, each, expert_parallelism(experts, costs.degree))
        for tokens, measured in places(axes.tokens):
            if tokens > experts:  # with fewer, several steps share a place
                where = [routing.tokens(tokens), routing.active(tokens)]
                found.append(Question(("moe", where), costs.routed(tokens).us, measured))
    return found


def places(measured: Sequence[int]) -> list[tuple[int, bool]]:
    """Measured places, and those in the middle between two of them."""
    between = {(low + high) // 2 for low, high in itertools.pairwise(measured)}
    return sorted([*((n, True) for n in measured), *((n, False) for n in between - {*measured})])


def check(models: Sequence[LatencyModel], checkout: Path) -> list[Row]:
    """Export `models`, which are one at several degrees, and ask the simulator."""
    architecture = architecture_of(models[0].configuration, models[0].occurrences)
    all_costs = [LayerCosts(model, architecture) for model in models]
    axes = axes_of(models)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        manifest = get_exporter("llmservingsim").export(models, out, {})
        limits = manifest["ranges"]
        rows = []
        for costs in all_costs:
            asked = questions(costs, all_costs[0], axes)
            steps = random_batches(
                STEPS,
                max_tokens=min(limits["max_tokens"], axes.chunks[-1]),
                max_seqs=limits["max_seqs"],
                max_length=limits["max_kv"],
                seed=costs.degree,
            )
            if architecture.experts and costs.degree > 1:
                steps = [step for step in steps if step.num_tokens > architecture.experts]
            answers = run.ask(out, checkout, costs.degree, [q.lookup for q in asked], steps)
            worst = [0.0, 0.0]
            for question, ns in zip(asked, answers.lookups, strict=True):
                # Whole nanoseconds, and none below one.
                off = 100 * abs(ns / 1e3 - question.us) / max(question.us, 0.1)
                worst[question.on_grid] = max(worst[question.on_grid], off)
            off_steps = [
                100 * abs(trace["ns"] / 1e3 / costs.step_us(step) - 1)
                for step, trace in zip(steps, answers.traces, strict=True)
            ]
            wanted = {*architecture.layers} - {"attention", "moe"}
            on_grid = sum(question.on_grid for question in asked)
            rows.append(
                Row(
                    models[0].configuration.model,
                    costs.degree,
                    len(architecture.layers),
                    tuple(sorted(wanted - {*answers.layers})),
                    answers.traces[0]["rows"],
                    manifest["llmservingsim"]["trace_rows"][str(costs.degree)],
                    (on_grid, len(asked) - on_grid),
                    (worst[True], worst[False]),
                    len(steps),
                    max(off_steps),
                )
            )
    return rows


def table(rows: Sequence[Row], command: str) -> str:
    """Markdown."""
    lines = [
        "# LLMServingSim's own code on exports of measured models",
        "",
        f"Written by `{command}`: its loader, look-ups and trace generator against the database.",
        "Figures are the worst deviation in percent.",
        "",
        "| model | tp | layers | missing | trace rows | look-ups at measured places | between "
        "| random steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.model} | {row.degree} | {row.layers} | {', '.join(row.missing) or 'none'} "
            f"| {row.rows} of {row.expected_rows} | {row.worst[0]:.3f} ({row.lookups[0]}) "
            f"| {row.worst[1]:.3f} ({row.lookups[1]}) | {row.worst_step:.3f} ({row.steps}) |"
        )
    return "\n".join(lines) + "\n"


@click.command(context_settings=console.CONTEXT_SETTINGS)
@click.option("--checkout", type=click.Path(path_type=Path), help="Default: $LLMSERVINGSIM_REPO.")
@console.output_option("A Markdown file for the table.")
def main(checkout: Path | None, out: Path | None) -> None:
    """Compare LLMServingSim's look-ups and steps with the database."""
    folder = run.checkout_folder(checkout)
    rows: list[Row] = []
    for path, name, degrees in MODELS:
        with Database.open(path, read_only=True) as database:
            models = [
                LatencyModel.load(
                    database, name, tensor_parallel=degree, backend=BACKENDS.get(path)
                )
                for degree in degrees
            ]
        rows += check(models, folder)
    given = shlex.join(["python", "-m", "integration.llmservingsim.table", *sys.argv[1:]])
    text = table(rows, given)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, "utf-8")
    click.echo(text, nl=False)
    if not all(row.fine for row in rows):
        raise CheckFailed(
            f"a layer is missing, or something is off by more than {LIMIT_PERCENT:g}%"
        )


if __name__ == "__main__":
    console.run(main, "llmservingsim-table")
