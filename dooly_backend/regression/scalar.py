"""Predictions of one batch: straight-line code for plain numbers, compiled on first use.

A prediction of one batch is a few hundred additions and comparisons. Walking the regressor's
objects, its lists of parameters and Python's loops took more than twice as long as those, so
its parts write down the lines that work out their number, as `dataclasses` and `namedtuple`
do for methods, each beside the vectorised formula that the lines must agree with
(tests/test_scalar.py compares them).

    def write(self, code):
        over = code.let(f"{code.feature(3)} - {literal(self.low)}")
        return code.let(f"{over} * {literal(self.slope)} if {over} > 0.0 else 0.0")

Lines hold words of this package and numbers, nothing else of a bundle: see `literal`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

One = Callable[[Sequence[float]], float]

#: What lines may use by these names; `inf` and `nan` are how those numbers are written.
_KNOWN: dict[str, Any] = {
    "log": math.log,
    "exp": math.exp,
    "trunc": math.trunc,
    "inf": math.inf,
    "nan": math.nan,
}


def literal(number: float) -> str:
    """A number as it is written in code. Raises TypeError for anything else."""
    if not isinstance(number, int | float):
        raise TypeError(f"expected a number, not {type(number).__name__}")
    return repr(float(number))


class Code:
    """The lines of a function of one row, in the order in which they are written.

    Expressions and names are text. A name is a local variable of the function, or,
    where `bound` gave it, something that exists outside it.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._features: set[int] = set()
        self._outside = dict(_KNOWN)
        #: Of each open block, the names of expressions that it worked out.
        self._known: list[dict[str, str]] = [{}]
        self._names = 0

    def feature(self, column: int) -> str:
        """The row's number in a column."""
        self._features.add(column)
        return f"f{column}"

    def bound(self, thing: Any) -> str:
        """A list or function that the lines use."""
        name = f"b{len(self._outside)}"
        self._outside[name] = thing
        return name

    def name(self) -> str:
        """A new local, which has no value yet."""
        self._names += 1
        return f"n{self._names}"

    def line(self, text: str) -> None:
        self._lines.append("    " * len(self._known) + text)

    def let(self, expression: str) -> str:
        """A new local with this value."""
        name = self.name()
        self.line(f"{name} = {expression}")
        return name

    def once(self, expression: str) -> str:
        """The local with this value, worked out where this or an enclosing block did not yet.

        For expressions of features, which do not change.
        """
        for known in self._known:
            if expression in known:
                return known[expression]
        name = self._known[-1][expression] = self.let(expression)
        return name

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Lines under ``if``, ``elif`` or ``else``; at least one must be written."""
        self.line(f"{head}:")
        self._known.append({})
        yield
        self._known.pop()

    def text(self, result: str) -> str:
        """The source of the function, which returns `result`."""
        features = [f"    f{column} = row[{column}]" for column in sorted(self._features)]
        return "\n".join(["def one(row):", *features, *self._lines, f"    return {result}", ""])

    def function(self, result: str) -> Callable[[Sequence[float]], Any]:
        """The function of a row that returns `result`."""
        names = dict(self._outside)
        exec(compile(self.text(result), "<a prediction of one batch>", "exec"), names)
        return names["one"]


def compiled(write: Callable[[Code], str]) -> Callable[[Sequence[float]], Any]:
    """The function of a row whose lines `write` writes, and whose result it names."""
    code = Code()
    return code.function(write(code))
