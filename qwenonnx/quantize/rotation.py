"""Offline rotation of the residual stream (QuaRot, arXiv 2404.00456; SpinQuant, arXiv 2405.16406).

RMSNorm without its gain commutes with an orthogonal matrix R, so a model whose residual stream is multiplied by R
computes the same logits, but the few huge activations that spoil integer scales are spread over all channels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SIGN_SEED = 20_240_406
MAX_DOWN_BLOCK = 128


def hadamard(size: int) -> NDArray[np.float32]:
    """The normalized Hadamard matrix `[size, size]` (Sylvester's); `size` is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(matrix / np.sqrt(size), dtype=np.float32)


def cosine_basis(size: int) -> NDArray[np.float32]:
    """The orthonormal DCT-II matrix `[size, size]`: a closed form, so that every machine gets the same one."""
    rows, columns = np.mgrid[0:size, 0:size]
    matrix = np.sqrt(2 / size) * np.cos(np.pi * (2 * columns + 1) * rows / (2 * size))
    matrix[0] /= np.sqrt(2)
    return np.asarray(matrix, dtype=np.float32)


def power_of_two_factor(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size


class Rotation:
    """The orthogonal matrix R = D kron(C, H): signs D, a cosine basis C and a Hadamard matrix H, `[size, size]`.

    It is never formed: `apply` costs `size / power + power` products a number.
    """

    def __init__(self, size: int) -> None:
        self._power = power_of_two_factor(size)
        self._hadamard = hadamard(self._power)
        self._cosine = cosine_basis(size // self._power)
        self._signs = np.random.default_rng(SIGN_SEED).choice(np.array([-1, 1], dtype=np.float32), size)

    def apply(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """`rows @ R` for rows `[n, size]`."""
        size = self._signs.size
        blocks = (rows * self._signs).reshape(-1, self._power) @ self._hadamard
        blocks = blocks.reshape(-1, size // self._power, self._power)
        return np.ascontiguousarray(np.matmul(self._cosine.T, blocks)).reshape(-1, size)

    def apply_to_columns(self, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
        """`R^T @ matrix` for a matrix `[size, n]`."""
        return np.ascontiguousarray(self.apply(np.ascontiguousarray(matrix.T)).T)


def rotate_blocks(rows: NDArray[np.float32], block_rotation: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiplies each block of each row by `block_rotation` `[block, block]`."""
    return (rows.reshape(-1, len(block_rotation)) @ block_rotation).reshape(rows.shape)


def down_block(intermediate_size: int) -> int:
    """Block size for the rotation of down_proj's input: at most 128, and a divisor of the width."""
    return min(power_of_two_factor(intermediate_size), MAX_DOWN_BLOCK)
