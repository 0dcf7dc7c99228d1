"""GPTQ: the factor, and that feeding errors back beats rounding to the nearest."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from qwenonnx.graph.blocks import BlockFormat
from qwenonnx.quantize.block_scales import round_to_blocks
from qwenonnx.quantize.gptq import DAMPING, SMALL_INVERSE, inverse_factor, invert_lower, round_with_feedback

Array = NDArray[np.float32]


def correlated_inputs(count: int, width: int) -> Array:
    random = np.random.default_rng(1)
    mixing = random.standard_normal((width, width)) / 4
    return (random.standard_normal((count, width)) @ mixing + random.standard_normal((count, width))).astype(np.float32)


@pytest.mark.parametrize("size", [3, SMALL_INVERSE, SMALL_INVERSE + 37])
def test_a_lower_triangle_is_inverted(size: int) -> None:
    matrix = np.tril(np.random.default_rng(0).standard_normal((size, size)) / size) + 2 * np.eye(size)

    np.testing.assert_allclose(invert_lower(matrix) @ matrix, np.eye(size), atol=1e-10)


def test_the_factor_is_that_of_the_inverse_of_the_damped_matrix() -> None:
    inputs = correlated_inputs(500, 40)
    gram = inputs.T @ inputs
    damped = gram.astype(np.float64) + DAMPING * np.diagonal(gram).mean(dtype=np.float64) * np.eye(40)

    factor = inverse_factor(gram).astype(np.float64)

    assert (np.tril(factor, -1) == 0).all()
    np.testing.assert_allclose(factor.T @ factor, np.linalg.inv(damped), rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize("size", [16, 32, 128])
def test_feedback_keeps_products_closer(size: int) -> None:
    inputs = correlated_inputs(1000, 256)
    matrix = np.random.default_rng(2).standard_normal((64, 256)).astype(np.float32)
    storage = BlockFormat(4, size)

    def error(approximation: Array) -> float:
        return float(np.square(inputs @ (approximation - matrix).T).sum())

    nearest = round_to_blocks(matrix, storage)
    corrected = round_with_feedback(matrix, inverse_factor(inputs.T @ inputs), storage)

    assert error(corrected.dequantized()) < 0.75 * error(nearest.dequantized())
    assert corrected.values.max() <= 15


def test_an_input_that_is_always_zero_does_no_harm() -> None:
    inputs = correlated_inputs(200, 32)
    inputs[:, 5] = 0
    matrix = np.random.default_rng(2).standard_normal((8, 32)).astype(np.float32)

    result = round_with_feedback(matrix, inverse_factor(inputs.T @ inputs), BlockFormat(4, 32))

    assert np.isfinite(result.scales).all()
