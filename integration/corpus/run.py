"""What each planner would measure of the paper's corpora, one engine per process.

Usage: python -m integration.corpus.run [NAME ...] [--out FOLDER] [--timeout SECONDS]
           [--again] [--tables] [--png PLOTLY_JS]

A NAME is a part of a case's name; without any, all run. What is in
FOLDER/models already is kept, unless --again is given: a run that is stopped
goes on where it was. --tables only rebuilds the tables and the plot; --png
draws the plot too, with chromium and the plotly.js that it names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from integration.corpus.corpora import CASES, Case, find
from integration.corpus.plot import HEIGHT, png
from integration.corpus.table import write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--png", type=Path, metavar="PLOTLY_JS")
    arguments = parser.parse_args()
    models = arguments.out / "models"
    models.mkdir(parents=True, exist_ok=True)
    failed = 0
    for case in [] if arguments.tables else find(arguments.names):
        path = models / case.file
        if path.is_file() and not arguments.again and "error" not in json.loads(path.read_text()):
            continue
        start = time.monotonic()
        result = run(case, arguments.timeout)
        failed += "error" in result
        path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
        print(
            f"{case.name}: {result.get('error') or summary(result)}, "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )
    page, charts = write(results(models), arguments.out)
    if arguments.png:
        png(page, arguments.png, charts * HEIGHT + 40)
    return 1 if failed else 0


def run(case: Case, timeout: float) -> dict[str, Any]:
    """One case in a process of its own."""
    command = [sys.executable, "-m", "integration.corpus.one", case.name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"name": case.name, "error": f"no end after {timeout:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith('{"name"'):
            return dict(json.loads(line))
    lines = [line for line in done.stderr.splitlines() if "Error" in line and "leaked" not in line]
    return {"name": case.name, "error": (lines or ["no output"])[-1].strip()}


def summary(result: dict[str, Any]) -> str:
    count = sum(count for _, _, count in result["occurrences"])
    return f"{count} occurrences, {len(result['signatures'])} signatures"


def results(models: Path) -> dict[str, dict[str, Any]]:
    """What has run, by case name, in the order of the corpora."""
    return {
        case.name: json.loads((models / case.file).read_text())
        for case in CASES
        if (models / case.file).is_file()
    }


if __name__ == "__main__":
    sys.exit(main())
