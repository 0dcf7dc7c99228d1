"""GPTQ (arXiv 2210.17323): rounding one column after the other, the rest making up for each one's error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenonnx.graph.blocks import BlockFormat, BlockMatrix
from qwenonnx.quantize.block_scales import round_to_scales, search_scales

Array = NDArray[np.float32]
# Of the mean of the Gram matrix's diagonal, added to all of it, so that it can be inverted.
DAMPING = 0.01
# Columns whose corrections are applied to the rest of the matrix at once.
STRIPE = 128
SMALL_INVERSE = 256


def inverse_factor(gram: Array) -> Array:
    """The upper Cholesky factor of the inverse of the damped Gram matrix `[K, K]`."""
    damped = gram.astype(np.float64)
    diagonal = np.einsum("kk->k", damped)
    diagonal[diagonal == 0] = 1  # an input that is always 0
    diagonal += DAMPING * diagonal.mean()
    # With the order of the columns reversed, the inverse of the Cholesky factor is the factor of the inverse.
    lower = np.asarray(np.linalg.cholesky(damped[::-1, ::-1]), dtype=np.float64)
    factor = invert_lower(lower)[::-1, ::-1]
    return np.ascontiguousarray(factor, dtype=np.float32)


def invert_lower(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of a lower triangular matrix, by halves: a sixth of the work of a general inverse."""
    size = len(matrix)
    if size <= SMALL_INVERSE:
        return np.asarray(np.linalg.inv(matrix))
    half = size // 2
    result = np.zeros_like(matrix)
    result[:half, :half] = invert_lower(matrix[:half, :half])
    result[half:, half:] = invert_lower(matrix[half:, half:])
    result[half:, :half] = -(result[half:, half:] @ matrix[half:, :half]) @ result[:half, :half]
    return result


def round_with_feedback(matrix: Array, factor: Array, storage: BlockFormat) -> BlockMatrix:
    """Rounds `[N, K]` so that its products with certain inputs change least.

    `factor` `[K, K]` is the `inverse_factor` of the inputs' Gram matrix. Scales are chosen block by block from the
    corrected weights.
    """
    bits, size = storage.bits, storage.block_size
    rows, width = matrix.shape
    # Columns are worked on as rows of the transpose, which lie in memory together.
    rest = np.array(matrix.T, order="C")
    importance = np.asarray(1 / np.square(np.diagonal(factor)), dtype=np.float32)
    steps = np.empty((width, rows), dtype=np.float32)
    scales = np.empty((width // size, rows), dtype=np.float32)
    for start in range(0, width, STRIPE):
        stop = min(start + STRIPE, width)
        errors = np.empty((stop - start, rows), dtype=np.float32)
        for column in range(start, stop):
            if column % size == 0:
                block = np.ascontiguousarray(rest[column : column + size].T)
                scales[column // size] = search_scales(block, bits, importance[column : column + size])
            scale = scales[column // size]
            steps[column] = round_to_scales(rest[column][:, None], scale, bits)[:, 0]
            error = (rest[column] - steps[column] * scale) / factor[column, column]
            errors[column - start] = error
            rest[column + 1 : stop] -= factor[column, column + 1 : stop, None] * error
        rest[stop:] -= factor[start:stop, stop:].T @ errors
    values = (steps + (1 << (bits - 1))).astype(np.uint8).T
    return BlockMatrix(np.ascontiguousarray(values), np.ascontiguousarray(scales.T), storage)
