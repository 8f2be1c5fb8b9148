"""The coverage table: one engine per process, so that a failure does not stop the rest.

Usage: python -m integration.coverage.run [NAME ...] [--out FOLDER] [--timeout SECONDS]

A NAME is a part of a model's name ("qwen3", "tp4"); without any, all run.
Results go to coverage.csv and coverage.md in FOLDER; rows of models that did
not run this time are kept.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from integration.coverage.corpus import CASES, Case, find
from integration.coverage.table import COLUMNS, markdown

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--timeout", type=float, default=900)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "coverage.csv"
    rows = read(path)
    failed = 0
    for case in find(arguments.names):
        row = run(case, arguments.timeout)
        failed += "error" in row
        rows[case.name] = flat(row)
        write(path, rows)
        (arguments.out / "coverage.md").write_text(markdown(list(rows.values())))
        print(f"{case.name}: {row.get('error') or summary(row)}", flush=True)
    return 1 if failed else 0


def run(case: Case, timeout: float) -> dict[str, Any]:
    """One case in a process of its own."""
    start = time.time()
    command = [
        sys.executable, "-m", "integration.coverage.one", str(CASES.index(case)), str(start)
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return {"name": case.name, "shows": case.shows, "error": f"no end after {timeout:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith('{"name"'):
            return dict(json.loads(line))
    lines = [line for line in done.stderr.splitlines() if "Error" in line and "leaked" not in line]
    return {"name": case.name, "shows": case.shows, "error": (lines or ["no output"])[-1].strip()}


def summary(row: dict[str, Any]) -> str:
    return (
        f"{row['operations']} operations, {row['dimensions']} sizes, "
        f"accuracy {row['accuracy']:.2%}, "
        f"{row['repaired']} repaired, {sum(row['unlabelled'].values())} unlabelled, "
        f"{row['seconds']} s"
    )


def flat(row: dict[str, Any]) -> dict[str, str]:
    """The row as the CSV has it."""
    labels = row.get("labels", {})
    values = {
        **row,
        **{f"label_{name}": count for name, count in labels.items()},
        "unlabelled": sum(row.get("unlabelled", {}).values()) if "labels" in row else "",
        "unlabelled_names": "; ".join(row.get("unlabelled", {})),
        "collision": "x".join(map(str, row.get("collision", []))),
    }
    default = 0 if labels else ""
    return {
        column: str(values.get(column, default if column.startswith("label_") else ""))
        for column in COLUMNS
    }


def read(path: Path) -> dict[str, dict[str, str]]:
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def write(path: Path, rows: dict[str, dict[str, str]]) -> None:
    order = [case.name for case in CASES]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows.values(), key=lambda row: order.index(row["name"])))


if __name__ == "__main__":
    sys.exit(main())
