from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwenonnx.engine.logits import check_peak, highest
from qwenonnx.errors import NumericalError


@given(st.integers(1, 3000), st.integers(-1, 40), st.integers(1, 200), st.integers(0, 2**32))
def test_the_highest_are_those_of_a_sort(size: int, count: int, levels: int, seed: int) -> None:
    row = np.random.default_rng(seed).integers(0, levels, size).astype(np.float32)
    order = sorted(range(size), key=lambda i: (-row[i], i))
    assert highest(row, count).tolist() == sorted(order[: max(count, 0)])


def test_impossible_ones_fill_up() -> None:
    row = np.full(2000, -np.inf, dtype=np.float32)
    row[1500] = 0.0
    assert highest(row, 3).tolist() == [0, 1, 1500]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_peak_that_is_not_finite_is_an_error(value: float) -> None:
    with pytest.raises(NumericalError, match="not finite"):
        check_peak(np.float32(value))
    check_peak(np.float32(3e38))
