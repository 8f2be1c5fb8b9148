"""The baseline over two axes: attention's phases and mixtures of experts.

The same lines as in interpolate.py, for many rows at once. A batch's features
do not tell its prefills one by one: several count as so many equal ones that
have the same tokens and the same work. For equal prefills, and for decodes,
that is what baseline.py computes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dooly_backend.regression.batches import Floats
from dooly_backend.regression.interpolate import Statistics, Surface
from dooly_backend.regression.models import (
    Parameters,
    Predictor,
    Regressor,
    Training,
    UnfitError,
    floats,
    model,
)
from dooly_backend.regression.tables import BASELINE


class Grid:
    """Times over (size, context): bilinear between knots, straight on beyond them."""

    def __init__(self, sizes: Floats, contexts: Floats, us: Floats) -> None:
        """`us` has a row for each size; the last context carries the slope beyond the others."""
        if us.shape != (len(sizes), len(contexts)) or not us.size:
            raise ValueError("a grid needs a time for every size and context")
        self._sizes, self._contexts, self._us = sizes, contexts, us
        self._lists: tuple[list[float], list[float], list[list[float]]] = (
            sizes.tolist(),
            contexts.tolist(),
            us.tolist(),
        )

    def many(self, size: Floats, context: Floats) -> Floats:
        low, share = _cells(self._sizes, size)
        left, across = _cells(self._contexts, context)
        high, right = _next(low, self._sizes), _next(left, self._contexts)
        near = self._us[low, left] * (1 - across) + self._us[low, right] * across
        far = self._us[high, left] * (1 - across) + self._us[high, right] * across
        # Beyond the last size the rise goes on, but noise does not make it fall.
        rise = np.where(share > 1, np.maximum(far - near, 0.0) * (share - 1), 0.0)
        return near + np.minimum(share, 1.0) * (far - near) + rise

    def one(self, size: float, context: float) -> float:
        sizes, contexts, us = self._lists
        low, share = _cell(sizes, size)
        left, across = _cell(contexts, context)
        here, there = us[low], us[min(low + 1, len(sizes) - 1)]
        right = min(left + 1, len(contexts) - 1)
        near = here[left] + across * (here[right] - here[left])
        far = there[left] + across * (there[right] - there[left])
        if share > 1:
            return far + max(far - near, 0.0) * (share - 1)
        return near + share * (far - near)


def _cells(knots: Floats, places: Floats) -> tuple[Any, Floats]:
    """Of each place its cell, and how far through it: 0 before the first knot, above 1 after."""
    if len(knots) == 1:
        return np.zeros(len(places), dtype=np.int64), np.zeros(len(places))
    low = np.clip(np.searchsorted(knots, places, side="right") - 1, 0, len(knots) - 2)
    return low, np.maximum((places - knots[low]) / (knots[low + 1] - knots[low]), 0.0)


def _cell(knots: list[float], place: float) -> tuple[int, float]:
    if len(knots) == 1:
        return 0, 0.0
    low = min(max(bisect_right(knots, place) - 1, 0), len(knots) - 2)
    return low, max((place - knots[low]) / (knots[low + 1] - knots[low]), 0.0)


def _next(low: Any, knots: Floats) -> Any:
    return np.minimum(low + 1, len(knots) - 1)


def grid_parameters(points: Mapping[tuple[float, float], float]) -> dict[str, Any]:
    """A grid from times by (size, context), some of which may be missing."""
    surface = Surface({at: Statistics(us, us, us, us, 0.0) for at, us in points.items()})
    sizes = sorted({size for size, _ in points})
    contexts = sorted({context for _, context in points})
    contexts.append(contexts[-1] + max(1.0, contexts[-1]))  # a knot to carry the last slope
    us = [[surface.at(size, c).statistics.median_us for c in contexts] for size in sizes]
    return {"sizes": sizes, "contexts": contexts, "us": us}


def load_grid(parameters: Parameters) -> Grid:
    """Raises KeyError, TypeError or ValueError for parameters of another shape."""
    sizes, contexts = floats(parameters["sizes"], 1), floats(parameters["contexts"], 1)
    if (np.diff(sizes) <= 0).any() or (np.diff(contexts) <= 0).any():
        raise ValueError("a grid's axes must rise")
    return Grid(sizes, contexts, floats(parameters["us"], 2))


# -- attention ------------------------------------------------------------------

_COLUMNS = (
    "prefills",
    "prefill_tokens",
    "prefill_root_square",
    "prefill_query_context",
    "decodes",
    "decode_context",
)


@model
class BatchGrid(Regressor):
    """The sum of a batch's prefills and of its decodes at their mean context."""

    name = BASELINE + "-batch"
    is_baseline = True
    kinds = ("batch",)

    def fit(self, data: Training, earlier: Parameters | None = None) -> Parameters:
        prefills: dict[tuple[float, float], float] = {}
        decodes: dict[tuple[float, float], float] = {}
        columns = {name: data.column(name) for name in (*_COLUMNS, "decode_unevenness")}
        for row, us in enumerate(data.us.tolist()):
            at = {name: float(column[row]) for name, column in columns.items()}
            if at["prefills"] == 1 and not at["decodes"]:
                chunk = at["prefill_tokens"]
                prefills[chunk, at["prefill_query_context"] / chunk] = us
            elif at["decodes"] and not at["prefills"] and at["decode_unevenness"] == 1:
                decodes[at["decodes"], at["decode_context"]] = us
        if not prefills and not decodes:
            raise UnfitError("needs single prefills or equal decodes")
        return {
            "prefills": grid_parameters(prefills) if prefills else None,
            "decodes": grid_parameters(decodes) if decodes else None,
        }

    def load(self, parameters: Parameters, features: tuple[str, ...]) -> Predictor:
        grids = [
            load_grid(parameters[phase]) if parameters[phase] is not None else None
            for phase in ("prefills", "decodes")
        ]
        return _BatchGrids(grids[0], grids[1], features)


class _BatchGrids(Predictor):
    def __init__(self, prefills: Grid | None, decodes: Grid | None, features: tuple) -> None:
        self._prefills, self._decodes = prefills, decodes
        self._columns = [features.index(name) for name in _COLUMNS]

    def many(self, rows: Floats) -> Floats:
        count, tokens, root, product, decodes, context = (rows[:, i] for i in self._columns)
        us = np.zeros(len(rows))
        some = count > 0
        if self._prefills is not None and some.any():
            n = count[some]
            chunk = tokens[some] / n
            history = _history(n, chunk, root[some], product[some])
            us[some] += n * self._prefills.many(chunk, history)
        some = decodes > 0
        if self._decodes is not None and some.any():
            us[some] += self._decodes.many(decodes[some], context[some])
        return us

    def one(self, row: Sequence[float]) -> float:
        count, tokens, root, product, decodes, context = (row[i] for i in self._columns)
        us = 0.0
        if count and self._prefills is not None:
            chunk = tokens / count
            us += count * self._prefills.one(chunk, _history(count, chunk, root, product))
        if decodes and self._decodes is not None:
            us += self._decodes.one(decodes, context)
        return us


def _history(count: Any, chunk: Any, root: Any, product: Any) -> Any:
    """The history of `count` equal prefills of `chunk` that do the same work: q*c + q*q/2."""
    return ((product + root * root / 2) / count - chunk * chunk / 2) / chunk


# -- mixtures of experts --------------------------------------------------------


@model
class RoutingGrid(Regressor):
    """Over the tokens and the experts that fire."""

    name = BASELINE + "-routing"
    is_baseline = True
    kinds = ("routing",)

    def fit(self, data: Training, earlier: Parameters | None = None) -> Parameters:
        places = zip(data.column("num_tokens"), data.column("experts"), strict=True)
        points = {(float(t), float(e)): us for (t, e), us in zip(places, data.us, strict=True)}
        return grid_parameters({at: float(us) for at, us in points.items()})

    def load(self, parameters: Parameters, features: tuple[str, ...]) -> Predictor:
        columns = features.index("num_tokens"), features.index("experts")
        return _RoutingGrid(load_grid(parameters), columns)


class _RoutingGrid(Predictor):
    def __init__(self, grid: Grid, columns: tuple[int, int]) -> None:
        self._grid = grid
        self._tokens, self._experts = columns

    def many(self, rows: Floats) -> Floats:
        return self._grid.many(rows[:, self._tokens], rows[:, self._experts])

    def one(self, row: Sequence[float]) -> float:
        return self._grid.one(row[self._tokens], row[self._experts])
