"""Tables in Markdown, and whether a figure reaches its target."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MISSES = "**misses**"
CAUSE = "cause.md"
_JOINED = "\x00"


@dataclass(frozen=True)
class Target:
    """The range that a figure should lie in; `text` says it."""

    text: str
    most: float = float("inf")
    least: float = float("-inf")

    def mark(self, *figures: float) -> str:
        """What is written beside figures that belong to one row: nothing where all reach it."""
        return "" if all(self.least <= figure <= self.most for figure in figures) else MISSES


def at_most(limit: float, unit: str = "%") -> Target:
    return Target(f"at most {limit:g}{unit}", most=limit)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table; columns of numbers are to the right."""
    rows = [list(map(str, row)) for row in rows]
    right = [all(_is_number(row[i]) for row in rows) for i in range(len(heads))]
    return [
        f"| {' | '.join(heads)} |",
        f"| {' | '.join('---:' if is_right else '---' for is_right in right)} |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in ("+", "-")


def paragraph(*pieces: str) -> str:
    """One paragraph, in lines as long as those of the other pages; code is not broken."""
    text = re.sub(r"`[^`]*`", lambda code: code.group().replace(" ", _JOINED), " ".join(pieces))
    lines = textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
    return lines.replace(_JOINED, " ")


def causes(root: Path, files: Iterable[Path]) -> list[str]:
    """What is written next to results about them, in their order.

    That is cause.md of a folder, and NAME.cause.md beside a file.
    """
    lines: list[str] = []
    places = [
        place
        for file in files
        for place in ((file.parent, file.parent / CAUSE), (file, file.with_suffix(f".{CAUSE}")))
    ]
    for about, text in dict.fromkeys(places):
        if text.is_file():
            name = f"`{about.relative_to(root).as_posix()}`:"
            lines += ["", paragraph(name, text.read_text().strip())]
    return lines


def source(root: Path, paths: Iterable[Path]) -> str:
    """Where the figures are from, to be read: the folders, or a file that is alone."""
    found = list(paths)
    folders = sorted({path.parent for path in found})
    names = [found[0]] if len(found) == 1 else folders
    return ", ".join(f"`{name.relative_to(root).as_posix()}`" for name in names)
