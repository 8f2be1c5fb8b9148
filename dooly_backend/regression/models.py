"""Regressors: what predicts a signature's time from its features, and their registry.

A regressor learns `Parameters`, plain data that JSON can hold, and turns such
data into a `Predictor`. Nothing else of it goes into a bundle, so that reading
one runs no code but this package's and that of registered packages.

    @model
    class Mine(Regressor):
        name = "mine"
        kinds = ("tokens",)
        def fit(self, data, earlier=None): ...
        def load(self, parameters): ...

Which of them a signature gets is decided by their errors at points that were
held out (fitting.py). Another package registers its own by the entry-point
group ``dooly.regression``.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import Any

import numpy as np

from dooly_backend.errors import InputError
from dooly_backend.regression.batches import Floats
from dooly_backend.regression.scalar import Code, One, compiled
from dooly_backend.workload import PointKind

GROUP = "dooly.regression"
#: What a regressor learned: dicts, lists, numbers and text.
Parameters = Mapping[str, Any]


class UnfitError(Exception):
    """These measurements cannot be learned by this regressor: too few, or of another shape."""


@dataclass(frozen=True)
class Training:
    """Measured points of one signature: `rows` (points, features), medians in microseconds.

    `noise` is the relative standard error of each median.
    """

    kind: PointKind
    features: tuple[str, ...]
    rows: Floats
    us: Floats
    noise: Floats

    def __len__(self) -> int:
        return len(self.us)

    def column(self, name: str) -> Floats:
        return self.rows[:, self.features.index(name)]

    def only(self, chosen: Any) -> Training:
        """Those points that an index array or a mask chooses."""
        return Training(
            self.kind, self.features, self.rows[chosen], self.us[chosen], self.noise[chosen]
        )


class Predictor(ABC):
    """Times of one signature, in microseconds."""

    @abstractmethod
    def many(self, rows: Floats) -> Floats:
        """The time for each row of features."""

    def one(self, row: Sequence[float]) -> float:
        """The same for a single row; overridden where that is quicker."""
        return float(self.many(np.array([row], dtype=np.float64))[0])

    def write(self, code: Code) -> str:
        """Lines that work the same out, and the name of the result; `Written` ones have them."""
        return code.let(f"{code.bound(self.one)}(row)")


class Written(Predictor):
    """A predictor whose times of one row are worked out by lines that it writes (scalar.py)."""

    @abstractmethod
    def write(self, code: Code) -> str:
        """Lines that work out the time of one row, and the name of the result."""

    def one(self, row: Sequence[float]) -> float:
        return self._one(row)

    @cached_property
    def _one(self) -> One:
        return compiled(self.write)

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in self.__dict__.items() if name != "_one"}


class Regressor(ABC):
    """One way to predict a time. `kinds` are the signatures that it suits."""

    name: str
    kinds: tuple[PointKind, ...]
    is_baseline = False  # of its kinds: what others have to beat
    by_default = True  # tried where nobody asks for it by name

    @abstractmethod
    def fit(self, data: Training, earlier: Parameters | None = None) -> Parameters:
        """What it learns. Raises UnfitError where it cannot.

        `earlier` is what it learned from almost the same points: what is slow
        to find and hardly changes with them may be taken from it.
        """

    @abstractmethod
    def load(self, parameters: Parameters, features: tuple[str, ...]) -> Predictor:
        """The predictor for rows whose columns are `features`.

        May raise KeyError, TypeError, ValueError or IndexError for parameters
        that `fit` cannot have made.
        """


_MODELS: dict[str, Regressor] = {}


def model(cls: type[Regressor]) -> type[Regressor]:
    """Register a regressor. Raises ValueError for a name that is taken."""
    if cls.name in _MODELS:
        raise ValueError(f"there is a regressor {cls.name!r} already")
    _MODELS[cls.name] = cls()
    return cls


def models_of(kind: PointKind) -> list[Regressor]:
    """Every regressor that suits a kind of signature; the baseline comes first."""
    load_plugins()
    suiting = [each for each in _MODELS.values() if kind in each.kinds]
    return sorted(suiting, key=lambda each: not each.is_baseline)


def is_known(name: str) -> bool:
    """Whether a regressor of that name is registered."""
    load_plugins()
    return name in _MODELS


def get_model(name: str) -> Regressor:
    """The regressor of that name. Raises InputError naming the known ones."""
    load_plugins()
    if name not in _MODELS:
        raise InputError(
            f"unknown regressor {name!r}: install the package that registers it; "
            f"known are {', '.join(_MODELS)}"
        )
    return _MODELS[name]


def load(name: str, parameters: Parameters, features: tuple[str, ...]) -> Predictor:
    """The predictor of a regressor's parameters. Raises InputError for ones it cannot read."""
    try:
        return get_model(name).load(parameters, features)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"what regressor {name!r} is said to have learned cannot be used "
            f"({type(error).__name__}: {error}): fit again with `dooly fit`"
        ) from error


@functools.cache
def load_plugins() -> None:
    """Import what registers features and models: this package's, then other packages'."""
    from dooly_backend.regression import corrected, grids, roofline, tables  # noqa: F401

    for entry in metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except (ImportError, AttributeError, ValueError) as error:
            raise InputError(
                f"the regression plug-in {entry.name!r} cannot be loaded: {error}"
            ) from error


def floats(values: Any, dimensions: int) -> Floats:
    """Parameters as an array of so many dimensions. Raises ValueError for anything else."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != dimensions or not np.isfinite(array).all():
        raise ValueError(f"expected finite numbers in {dimensions} dimensions")
    return array
