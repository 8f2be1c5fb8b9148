"""Compute again, from what is committed, every figure that predictions are part of.

    python -m integration.accuracy.refresh [--db h200.db] [--jobs 2] [--only served]

After a change of regressors, step model, simulator or database: recorded live runs and
measured steps stay as they are, and are compared with what is predicted now. Then
docs/accuracy.md is written. Needs neither engine nor GPU, Vidur for `vidur` alone; some twenty
minutes on two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "integration"


@dataclass(frozen=True)
class Task:
    """One comparison: what it is called, and the arguments of `python -m`."""

    name: str
    command: tuple[str, ...]


def served(db: str, root: Path = RESULTS) -> Iterator[Task]:
    """Recorded live runs of a GPU, folder by folder, as they were compared before."""
    for folder in sorted((root / "validate/results").glob("h200*")):
        known = json.loads((folder / "figures.json").read_text())
        runs = [str(run) for run in sorted(folder.glob("live-*.json.xz"))]
        options = ["--db", db, "--backend", known["backend"], "--mode", known["execution_mode"]]
        options += ["--calibrate" if known["calibrated"] else "--no-calibrate"]
        options += ["--device-clock"] if known["device_clock"] else []
        command = ["integration.validate.cross", known["model"], *runs, *options, "-o", str(folder)]
        yield Task(folder.name, tuple(command))


def steps(db: str, root: Path = RESULTS) -> Iterator[Task]:
    """Whole steps that no fit has seen, and single batches."""
    folder = root / "gpu/results/h200"
    files = sorted(map(str, folder.glob("steps-*.jsonl*")))
    out = str(folder / "step-errors.csv")
    yield Task("whole steps", ("integration.gpu.step_errors", "--db", db, "-o", out, *files))
    exported = [
        path
        for known in ("Llama-3.1-8B-*-full_graph", "Ministral-8B*", "Qwen3-14B*")
        for path in sorted(map(str, folder.glob(f"steps-{known}.jsonl*")))
    ]
    out = str(folder / "export-errors.csv")
    yield Task("exports", ("integration.gpu.export_errors", "--db", db, "-o", out, *exported))
    folder = root / "per_batch/results/h200"
    files = sorted(map(str, folder.glob("per-batch-*.jsonl*")))
    command = "integration.per_batch.report", "--db", db, "-o", str(folder), *files
    yield Task("single batches", command)


def points(db: str, root: Path = RESULTS) -> Iterator[Task]:
    """Points left out of the regressors' fits, and attention of another model."""
    out = str(root / "benchmarks/results/intervals-h200")
    command = "integration.benchmarks.intervals", db, "--seed", "0", "-o", out
    yield Task("intervals", command)
    out = str(root / "wrong_reuse/results/h200.json")
    yield Task("wrong reuse", ("integration.wrong_reuse.run", "--db", db, "-o", out))


def cost(db: str, root: Path = RESULTS) -> Iterator[Task]:
    """What deduplication saves, and how well the adaptive sweep predicts."""
    folder = root / "cost/results/h200"
    adaptive, scan, out = str(folder / "adaptive.db.xz"), str(folder / "scan.db.xz"), str(folder)
    command = "integration.cost.report", "--db", db, "--adaptive", adaptive, "-o", out
    yield Task("cost", command)
    yield Task("held out", ("integration.cost.held_out", scan, db, adaptive, "-o", out))


def vidur(db: str, root: Path = RESULTS) -> Iterator[Task]:
    """Recorded live runs beside the real Vidur on an export; needs Vidur installed."""
    for known in sorted((root / "vidur/results").glob("served-*.json")):
        about = json.loads(known.read_text())
        folder = root / "validate/results" / about["runs"]
        runs = [str(run) for run in sorted(folder.glob("live-*.json.xz"))]
        options = ["--db", db, "--backend", about["backend"], "-o", str(known)]
        command = ["integration.vidur.served", about["model"], *runs, *options]
        yield Task(f"Vidur, {about['runs']}", tuple(command))


GROUPS: dict[str, Callable[[str], Iterator[Task]]] = {
    "served": served,
    "steps": steps,
    "points": points,
    "cost": cost,
    "vidur": vidur,
}


@click.command()
@click.option("--db", default="builtin:h200", show_default=True, help="What predicts.")
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(1), help="At once.")
@click.option("--only", multiple=True, type=click.Choice(list(GROUPS)), help="May be repeated.")
def main(db: str, jobs: int, only: tuple[str, ...]) -> None:
    """Compare again, then write docs/accuracy.md."""
    tasks = [task for name in only or GROUPS for task in GROUPS[name](db)]
    with ThreadPoolExecutor(jobs) as pool:
        failed = [name for name, code in pool.map(run, tasks) if code]
    subprocess.run([sys.executable, "-m", "integration.accuracy.page"], cwd=ROOT, check=True)
    if failed:
        sys.exit(f"these did not end well: {', '.join(failed)}")


def run(task: Task) -> tuple[str, int]:
    """Run it, say how it ended and, where it failed, why; its exit code."""
    began = time.monotonic()
    command: Sequence[str] = [sys.executable, "-m", *task.command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    click.echo(f"{task.name}: exit code {done.returncode} after {seconds:.0f} s", err=True)
    if done.returncode:
        click.echo(done.stderr[-2000:], err=True)
    return task.name, done.returncode


if __name__ == "__main__":
    main()
