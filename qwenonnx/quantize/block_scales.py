"""Choosing the scale of a block of weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenonnx.graph.blocks import BlockFormat, BlockMatrix

Array = NDArray[np.float32]
# Scales tried for a block: they put its largest weight at 8 + offset steps of a 4-bit grid.
OFFSETS = (-1.2, -0.9, -0.6, -0.3, 0.0, 0.3, 0.6)
SMALLEST = np.float32(1e-30)
# Rows worked on at once, to bound the temporary memory.
ROWS_AT_ONCE = 4096


def round_to_scales(blocks: Array, scales: Array, bits: int) -> Array:
    """The signed steps `[..., block]` nearest to `blocks`, for scales `[...]`."""
    half = 1 << (bits - 1)
    low = -half if bits < 8 else 1 - half
    safe = np.where(scales == 0, np.float32(1), scales)
    return np.clip(np.rint(blocks / safe[..., None]), low, half - 1)


def search_scales(blocks: Array, bits: int, importance: Array | None = None) -> Array:
    """Scales `[...]` of blocks `[..., block]` that minimize the squared error, weighted by `importance`.

    With 8 bits the largest magnitude is put at 127. With fewer, the largest weight, with its sign, goes to the negative
    end of the grid, which reaches one step further, and some scales around that are tried; each is then replaced by the
    best one for the steps that it gives (as the k-quants of llama.cpp do). Scales may be negative.
    """
    if bits >= 8:
        return np.asarray(np.abs(blocks).max(axis=-1) / ((1 << (bits - 1)) - 1), dtype=np.float32)
    weight = np.ones_like(blocks) if importance is None else np.broadcast_to(importance, blocks.shape)
    peaks = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    best = np.zeros_like(peaks)
    best_gain = np.full_like(peaks, -1)
    for offset in OFFSETS:
        trial = peaks / np.float32(-(1 << (bits - 1)) - offset)
        steps = round_to_scales(blocks, trial, bits)
        products = np.einsum("...k,...k,...k->...", weight, blocks, steps)
        squares = np.einsum("...k,...k,...k->...", weight, steps, steps)
        squares = np.maximum(squares, SMALLEST)
        gain = products * products / squares
        better = gain > best_gain
        best = np.where(better, products / squares, best)
        best_gain = np.where(better, gain, best_gain)
    return best.astype(np.float32)


def round_to_blocks(matrix: Array, storage: BlockFormat, importance: Array | None = None) -> BlockMatrix:
    """Rounds `[N, K]` to the nearest values, block by block; `importance` `[K]` weights the squared errors."""
    bits, size = storage.bits, storage.block_size
    rows, width = matrix.shape
    values = np.empty((rows, width), dtype=np.uint8)
    scales = np.empty((rows, width // size), dtype=np.float32)
    weight = None if importance is None else importance.reshape(-1, size)
    for start in range(0, rows, ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        blocks = np.ascontiguousarray(matrix[part]).reshape(-1, width // size, size)
        scales[part] = search_scales(blocks, bits, weight)
        steps = round_to_scales(blocks, scales[part], bits)
        values[part] = (steps + (1 << (bits - 1))).astype(np.uint8).reshape(-1, width)
    return BlockMatrix(values, scales, storage)
