"""Ask LLMServingSim's own code what it makes of an export.

    python -m integration.llmservingsim.run EXPORT [--checkout DIR] [--tp 2] [--json]

DIR is a checkout of casys-kaist/LLMServingSim, by default the folder that
LLMSERVINGSIM_REPO names. It is not changed: what the simulator's Python needs
of it is copied to a temporary folder, and the export over it. ASTRA-Sim, the
network simulator below it, is not needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dooly_backend.errors import DoolyError, InputError
from dooly_backend.exporters import read_manifest
from dooly_backend.workload import Batch

CHECKOUT_VARIABLE = "LLMSERVINGSIM_REPO"
PROBE = Path(__file__).with_name("probe.py")
TIMEOUT_S = 600
#: Of a checkout, what its loader, look-ups and trace generator read.
_PARTS = ("serving", "profiler/models", "configs")

#: A look-up by its kind and arguments: ("dense", ["qkv_proj", 100]), ("attention", [0, 0, 8, 512])
Lookup = tuple[str, list[Any]]


@dataclass(frozen=True)
class Answers:
    """What the simulator's code says: nanoseconds of look-ups, traces of steps.

    `available` are the degrees, `layers` those of dense.csv and per_sequence.csv
    that it loaded; `kv_blocks` what its memory model makes of the cluster.
    """

    available: list[int]
    layers: list[str]
    kv_blocks: int
    lookups: list[int]
    traces: list[dict[str, Any]]


def checkout_folder(given: Path | None = None) -> Path:
    """The simulator's repository. Raises InputError."""
    name = os.environ.get(CHECKOUT_VARIABLE)
    folder = given or (Path(name) if name else None)
    if folder is None:
        raise InputError(
            f"where is LLMServingSim? Give --checkout or set {CHECKOUT_VARIABLE} to a clone of "
            "https://github.com/casys-kaist/LLMServingSim"
        )
    if not (folder / "serving" / "core" / "trace_generator.py").is_file():
        raise InputError(f"{folder} is no checkout of LLMServingSim")
    return folder


@contextmanager
def installed(export: Path, checkout: Path) -> Iterator[Path]:
    """A temporary folder: the simulator's Python with `export` copied over it, as users do."""
    with tempfile.TemporaryDirectory(prefix="dooly-llmservingsim-") as name:
        root = Path(name)
        for part in _PARTS:
            shutil.copytree(checkout / part, root / part)
        for part in ("profiler", "configs"):
            shutil.copytree(export / part, root / part, dirs_exist_ok=True)
        yield root


def ask(
    export: Path,
    checkout: Path,
    degree: int,
    lookups: Sequence[Lookup] = (),
    steps: Sequence[Batch] = (),
    python: str = sys.executable,
) -> Answers:
    """Raises InputError when `export` is none or the simulator's code fails."""
    manifest = read_manifest(export)
    if manifest.get("format") != "llmservingsim":
        raise InputError(f"{export} is an export for {manifest.get('format')}, not llmservingsim")
    cluster = manifest["clusters"].get(str(degree))
    if cluster is None:
        degrees = ", ".join(manifest["clusters"])
        raise InputError(f"{export} has no tensor-parallel degree {degree}, only {degrees}")
    question = {
        "cluster": cluster,
        "lookups": list(lookups),
        "steps": [[[r.query, r.context] for r in batch.requests] for batch in steps],
    }
    with installed(export, checkout) as root:
        done = subprocess.run(
            [python, str(PROBE), str(root)],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=root,
        )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise InputError(f"LLMServingSim failed: {lines[-1] if lines else done.returncode}")
    return Answers(**json.loads(done.stdout))


@click.command()
@click.argument("export", type=click.Path(path_type=Path))
@click.option("--checkout", type=click.Path(path_type=Path), help="Default: $LLMSERVINGSIM_REPO.")
@click.option("--tp", "degree", type=click.IntRange(1), help="Default: the smallest exported.")
@click.option("--batch", "batches", multiple=True, help="A step: 2x128+0,8x1+1024. Repeatable.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON on stdout.")
def main(
    export: Path, checkout: Path | None, degree: int | None, batches: tuple[str, ...], as_json: bool
) -> None:
    """Load EXPORT with LLMServingSim's code and print what its trace generator charges steps."""
    try:
        manifest = read_manifest(export)
        degree = degree or min(manifest.get("tensor_parallel", [1]))
        steps = [Batch.parse(text) for text in batches or ("1x128+0", "8x1+256")]
        answers = ask(export, checkout_folder(checkout), degree, steps=steps)
    except DoolyError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    expected = manifest["llmservingsim"]["trace_rows"].get(str(degree))
    missing = any(trace["rows"] != expected for trace in answers.traces)
    if as_json:
        result = {
            "model": manifest["model"],
            "tensor_parallel": degree,
            "trace_rows": [trace["rows"] for trace in answers.traces],
            "expected_rows": expected,
            "step_us": {b.key: t["ns"] / 1e3 for b, t in zip(steps, answers.traces, strict=True)},
        }
        click.echo(json.dumps(result))
    else:
        for batch, trace in zip(steps, answers.traces, strict=True):
            click.echo(f"{batch.key}: {trace['ns'] / 1e3:.1f} us in {trace['rows']} rows")
        click.echo(f"rows when no layer is missing: {expected}")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
