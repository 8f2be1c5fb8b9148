"""A smooth function as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dooly_backend.regression.lattice import Lattice
from dooly_backend.regression.scalar import compiled


def one(table: Lattice, axes: int) -> Callable[[Sequence[float]], float]:
    """What the table writes for one row."""
    return compiled(lambda code: table.write(code, [code.feature(i) for i in range(axes)]))


def smooth(places: np.ndarray) -> np.ndarray:
    return np.sin(places).prod(axis=1) + places.sum(axis=1)


@given(
    st.integers(1, 3).flatmap(
        lambda axes: st.lists(
            st.lists(st.floats(-9, 9), min_size=axes, max_size=axes), min_size=1, max_size=5
        )
    )
)
def test_a_table_is_close_to_its_function_and_keeps_the_edge(places: list[list[float]]) -> None:
    at = np.array(places)
    axes = at.shape[1]
    low, high = np.full(axes, -2.0), np.full(axes, 3.0)
    table = Lattice(smooth, low, high, np.ones(axes))
    many = table.many(at)
    np.testing.assert_allclose(many, smooth(np.clip(at, low, high)), atol=0.03)
    np.testing.assert_allclose(list(map(one(table, axes), places)), many, atol=1e-12)


def test_axes_that_do_not_vary_are_left_out() -> None:
    low, high = np.array([0.0, 5.0, 1.0]), np.array([1.0, 5.0, 1.0])
    table = Lattice(lambda places: places.sum(axis=1), low, high, np.ones(3))
    np.testing.assert_allclose(table.many(np.array([[0.3, 9.0, 9.0], [7.0, 0.0, 0.0]])), [6.3, 7])
    assert one(table, 3)([0.3, 9.0, 9.0]) == pytest.approx(6.3)


def test_a_single_place_is_a_constant() -> None:
    table = Lattice(lambda places: places.sum(axis=1), np.ones(2), np.ones(2), np.ones(2))
    assert table.many(np.zeros((3, 2))).tolist() == [2, 2, 2]
    assert one(table, 2)([0.0, 0.0]) == 2


def test_four_axes_are_too_many() -> None:
    with pytest.raises(ValueError, match="4 axes"):
        Lattice(smooth, np.zeros(4), np.ones(4), np.ones(4))
