"""Export a database of twelve models to every format: seconds, and whether bytes repeat.

    python -m integration.benchmarks.export [--tp 1 --tp 2] [-o export.json]

The database is a FIXTURE: real configs, times from the formulas of the tests.
Seconds are processor time of this process, which runs on one core: on a machine
of its own they are what a clock shows. They count reading the database and
writing all files. Exit code 1 where they are more than ``--limit``, or where a
second export differs in a byte.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from dooly_backend import console
from dooly_backend.database import Database
from dooly_backend.errors import CheckFailed
from dooly_backend.export_command import load_models
from dooly_backend.exporters import exporter_names, get_exporter

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import shim_fixture

MODELS = (
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-2-7b-hf",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-30B-A3B",
    "mistralai/Mixtral-8x7B-v0.1",
    "mistralai/Mistral-7B-v0.3",
    "deepseek-ai/deepseek-llm-7b-base",
)
LIMIT_SECONDS = 10.0


@click.command(context_settings=console.CONTEXT_SETTINGS)
@click.option("--tp", "degrees", type=int, multiple=True, default=(1,), help="Degrees to export.")
@click.option("--to", "formats", multiple=True, help="Formats. [default: all]")
@click.option("--limit", type=float, default=LIMIT_SECONDS, show_default=True, help="Seconds.")
@console.output_option("A JSON file for the result.")
@console.json_option
def main(
    degrees: tuple[int, ...],
    formats: tuple[str, ...],
    limit: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time the export of twelve models to all formats."""
    chosen = formats or tuple(exporter_names())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        database = make_database(folder / "latency.db", degrees)
        start = time.perf_counter()
        first = export_all(database, folder / "first", chosen)
        clock = time.perf_counter() - start
        second = export_all(database, folder / "second", chosen)
        differing = differences(folder / "first", folder / "second")
    result = {
        "command": shlex.join(["python", "-m", "integration.benchmarks.export", *sys.argv[1:]]),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "models": len(MODELS),
        "degrees": list(degrees),
        "cpu_seconds": {name: round(seconds, 2) for name, seconds in first.items()},
        "total_cpu_seconds": round(sum(first.values()), 2),
        "clock_seconds": round(clock, 2),
        "repeated_cpu_seconds": round(sum(second.values()), 2),
        "limit_seconds": limit,
        "byte_identical": not differing,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    if as_json:
        console.print_json(result)
    else:
        for name, value in result.items():
            click.echo(f"{name}: {value}")
    if differing:
        raise CheckFailed(f"a second export differs in {len(differing)} files: {differing[0]}")
    if result["total_cpu_seconds"] > limit:
        raise CheckFailed(f"{result['total_cpu_seconds']:g} s is more than {limit:g} s")


def make_database(path: Path, degrees: Sequence[int]) -> Path:
    """A database of all `MODELS` at `degrees`."""
    for model in MODELS:
        for degree in degrees:
            shim_fixture.latency_model(path, model, degree)
    return path


def export_all(database: Path, out: Path, formats: Sequence[str]) -> dict[str, float]:
    """Seconds by format, and for reading the database, as one process takes them."""
    seconds: dict[str, float] = {}
    start = time.process_time()
    with Database.open(database, read_only=True) as opened:
        models = {model: load_models(opened, model, None) for model in MODELS}
    seconds["read"] = time.process_time() - start
    for name in formats:
        start = time.process_time()
        exporter = get_exporter(name)
        for model, of_model in models.items():
            exporter.export(of_model, out / name / model.replace("/", "--"), {})
        seconds[name] = time.process_time() - start
    return seconds


def differences(first: Path, second: Path) -> list[str]:
    """Files that are not the same in both."""
    digests: list[dict[str, str]] = [
        {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (first, second)
    ]
    names = sorted(set(digests[0]) | set(digests[1]))
    return [name for name in names if digests[0].get(name) != digests[1].get(name)]


if __name__ == "__main__":
    console.run(main, "export")
