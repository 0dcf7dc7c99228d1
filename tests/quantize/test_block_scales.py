"""Rounding to blocks: the stored layout, error bounds, and what the search for scales gains."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from qwenonnx.graph.blocks import BlockFormat
from qwenonnx.quantize.block_scales import round_to_blocks, search_scales


def gaussian(rows: int, width: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_eight_bits_are_within_half_a_step(size: int) -> None:
    matrix = gaussian(5, 256)
    stored = round_to_blocks(matrix, BlockFormat(8, size))

    step = np.repeat(np.abs(stored.scales), size, axis=1)
    assert (np.abs(stored.dequantized() - matrix) <= step / 2 + 1e-7).all()
    assert stored.values.min() >= 1  # symmetric: -127 to 127


def test_four_bits_err_less_than_plain_rounding() -> None:
    matrix = gaussian(64, 512)
    blocks = matrix.reshape(64, -1, 32)
    plain_scale = np.abs(blocks).max(-1, keepdims=True) / 7
    plain = (np.clip(np.rint(blocks / plain_scale), -8, 7) * plain_scale).reshape(matrix.shape)

    searched = round_to_blocks(matrix, BlockFormat(4, 32)).dequantized()

    assert np.square(searched - matrix).sum() < 0.8 * np.square(plain - matrix).sum()


def test_important_columns_err_less() -> None:
    matrix = gaussian(256, 32)
    importance = np.ones(32, dtype=np.float32)
    importance[3] = 1000

    even = round_to_blocks(matrix, BlockFormat(4, 32)).dequantized()
    weighted = round_to_blocks(matrix, BlockFormat(4, 32), importance).dequantized()

    assert np.square(weighted - matrix)[:, 3].sum() < 0.5 * np.square(even - matrix)[:, 3].sum()


def test_a_block_of_zeros_stays_zero() -> None:
    for bits in (4, 8):
        assert (round_to_blocks(np.zeros((2, 32), dtype=np.float32), BlockFormat(bits, 32)).dequantized() == 0).all()


def test_two_values_share_a_byte_the_first_one_low() -> None:
    matrix = np.zeros((1, 16), dtype=np.float32)
    matrix[0, :3] = [-8, 7, 1]
    stored = round_to_blocks(matrix, BlockFormat(4, 16))

    assert search_scales(matrix[None], 4)[0, 0] == pytest.approx(1, rel=1e-6)
    assert stored.packed().shape == (1, 1, 8)
    assert stored.packed()[0, 0, :2].tolist() == [0 | 15 << 4, 9 | 8 << 4]
