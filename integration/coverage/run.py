"""The coverage table: one engine per process, so that a failure does not stop the rest.

Usage: python -m integration.coverage.run [NAME ...] [--part trace|runnable] [--missing]
           [--out FOLDER] [--timeout SECONDS]

A NAME is a model's name or a part of it ("qwen3", "tp4"); without any, all run.
The part trace labels and checks every size, the part runnable resolves the
trace into entries and checks what they cover; without --part, both. --missing
leaves out what FOLDER has already. Results go to coverage.csv, runnable.csv and
coverage.md in FOLDER; rows and columns that did not run this time are kept.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from integration.coverage.columns import COLUMNS, ENTRY_COLUMNS, FIRST_COLUMN, PARTS, flat, reasons
from integration.coverage.corpus import CASES, Case, find
from integration.coverage.table import markdown

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--timeout", type=float, default=900)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, entries_path = arguments.out / "coverage.csv", arguments.out / "runnable.csv"
    rows = {row["name"]: row for row in read(path)}
    entries = read(entries_path)
    failed = 0
    for case in find(arguments.names):
        have = rows.get(case.name, {})
        parts = arguments.part or PARTS
        if arguments.missing:
            parts = [part for part in parts if not have.get(FIRST_COLUMN[part])]
        if not parts:
            continue
        row = run(case, parts, arguments.timeout)
        failed += any(f"{part}_error" in row for part in parts)
        rows[case.name] = {**dict.fromkeys(COLUMNS, ""), **have, **flat(row, parts)}
        write(path, COLUMNS, list(rows.values()))
        if "runnable" in parts:
            entries = [old for old in entries if old["name"] != case.name] + reasons(row)
            write(entries_path, ENTRY_COLUMNS, entries)
        page = markdown(list(rows.values()), entries, [case.name for case in CASES])
        (arguments.out / "coverage.md").write_text(page)
        print(f"{case.name}: {summary(row, parts)}", flush=True)
    return 1 if failed else 0


def run(case: Case, parts: Sequence[str], timeout: float) -> dict[str, Any]:
    """One case in a process of its own. What stopped it is the error of every part."""
    start = time.time()
    command = [
        sys.executable, "-m", "integration.coverage.one", str(CASES.index(case)), str(start), *parts
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return _failed(case, parts, f"no end after {timeout:.0f} s")
    for line in done.stdout.splitlines():
        if line.startswith('{"name"'):
            return dict(json.loads(line))
    lines = [line for line in done.stderr.splitlines() if "Error" in line and "leaked" not in line]
    return _failed(case, parts, (lines or [f"no output, exit code {done.returncode}"])[-1].strip())


def _failed(case: Case, parts: Sequence[str], error: str) -> dict[str, Any]:
    return {
        "name": case.name,
        "shows": case.shows,
        "changes": case.changes,
        **{f"{part}_error": error for part in parts},
    }


def summary(row: dict[str, Any], parts: Sequence[str]) -> str:
    """The row in a line for the terminal."""
    said = {row[f"{part}_error"] for part in parts if f"{part}_error" in row}
    if "dimensions" in row:
        said.add(
            f"{row['operations']} operations, {row['dimensions']} sizes, "
            f"accuracy {row['accuracy']:.2%}, {row['repaired']} repaired, "
            f"{sum(row['unlabelled'].values())} unlabelled, {row['seconds']} s"
        )
    if "steps" in row:
        covered = (f"{s['once']} of {s['kernels']}" for s in _sets(row))
        said.add(f"once: {', '.join(covered)}, {row['resolve_seconds']} s")
    return "; ".join(sorted(said))


def _sets(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every step under every runnable set."""
    return (cover for step in row["steps"].values() for cover in step.values())


def read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, columns: Sequence[str], rows: list[dict[str, str]]) -> None:
    """The rows as CSV, sorted in place into the order of the cases."""
    order = [case.name for case in CASES]
    rows.sort(key=lambda row: order.index(row["name"]))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
