"""Write docs/accuracy.md from the committed measurements.

    python -m integration.accuracy.page            # writes the page
    python -m integration.accuracy.page --check    # exit code 1 where it is not as written

Every figure is read from a file of results; what misses its target is marked.
Where a folder of results has a cause.md, or a file a NAME.cause.md, its text
stands under the table: the cause of a miss, as far as it was found. Needs neither engine nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

from integration.accuracy import calls, gpu, per_batch, requests
from integration.accuracy.tables import MISSES, paragraph

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "accuracy.md"

INTRODUCTION = paragraph(
    "What was measured, beside what it should be. This page is written by",
    "`python -m integration.accuracy.page` from committed results; it is not edited by hand.",
    "Errors are absolute percentages, mean / worst, unless they have a sign. A row that does",
    f"not reach its target says {MISSES}.",
)

SECTIONS: dict[str, Callable[[Path], list[str]]] = {
    "Isolated calls against the live forward pass": calls.additivity,
    "Every kernel under exactly one entry": gpu.coverage,
    "Whole steps": gpu.whole_steps,
    "Whole steps, exported": gpu.exports,
    "Single batches": per_batch.single_batches,
    "The fastest model and backend": per_batch.fastest,
    "Served requests": requests.served,
    "Served requests in Vidur": requests.in_vidur,
    "Wrong reuse": requests.wrong_reuse,
    "Modules against their operations": calls.granularity,
    "Adaptive sweep against Vidur's grid": calls.sweeps,
    "Intervals": calls.intervals,
}


def page(root: Path) -> str:
    """The page, of the results below `root`."""
    lines = ["# Accuracy", "", INTRODUCTION]
    for title, section in SECTIONS.items():
        lines += ["", f"## {title}", "", *section(root)]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; tell whether the page is up to date.")
def main(check: bool) -> None:
    """Write docs/accuracy.md."""
    text = page(ROOT)
    if not check:
        PAGE.write_text(text)
        click.echo(f"{PAGE.relative_to(ROOT)}: {text.count(MISSES) - 1} misses")
    elif not PAGE.is_file() or PAGE.read_text() != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not as its results say: run it without --check")


if __name__ == "__main__":
    main()
