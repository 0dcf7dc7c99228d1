"""Rounding the matrices of a model with one scale per output channel, with calibration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.files import Progress
from qwenonnx.graph.blocks import BlockFormat
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.int8 import SMALLEST_SCALE, ChannelMatrix, quantize_rows
from qwenonnx.graph.linear import EMBEDDING, HEAD, joined, matrix_names
from qwenonnx.graph.weights import Weights
from qwenonnx.quantize.balanced_weights import BalancedWeights
from qwenonnx.quantize.calibration import CalibrationRun
from qwenonnx.quantize.gptq import inverse_factor, round_with_feedback
from qwenonnx.quantize.moments import measure_moments

Array = NDArray[np.float32]
# Of each calibration text: enough for Gram matrices of the hidden size. Each runs through the model twice.
TOKENS = 128
# Rows of the head worked on at once, to bound the temporary memory.
ROWS_AT_ONCE = 4096


class CalibratedChannels:
    """Rounds with GPTQ on the inputs that a calibration run gives; `head_gram` is the Gram matrix of the head's.

    down_proj, whose Gram matrix would cost more than everything else, is rounded to the nearest values, and so is an
    embedding that is not the head.
    """

    def __init__(self, config: ModelConfig, run: CalibrationRun, head_gram: Array) -> None:
        self._head = matrix_names(config)[-1]
        self._run = run
        self._head_gram = head_gram
        self._gram: Array | None = None
        self._factor: Array | None = None

    def quantize(self, name: str, matrix: Array) -> ChannelMatrix:
        """The stored form of a matrix `[N, K]`; linears must come in the order of the graph."""
        if name in (EMBEDDING, HEAD):
            if name != self._head:
                return ChannelMatrix(*quantize_rows(matrix))
            return round_channels(matrix, inverse_factor(self._head_gram))
        if name.endswith("down_proj"):
            self._run.inputs(name)
            result = ChannelMatrix(*quantize_rows(matrix))
        else:
            gram = self._run.gram(name)
            if self._factor is None or gram is not self._gram:
                self._gram, self._factor = gram, inverse_factor(gram)
            result = round_channels(matrix, self._factor)
        self._run.advance(name, result.dequantized())
        return result

    def keep(self, name: str, names: Sequence[str], weights: Weights) -> None:
        """Runs the calibration texts through a linear that stays in fp32."""
        self._run.inputs(name)
        self._run.advance(name, joined(weights, names))


def round_channels(matrix: Array, factor: Array) -> ChannelMatrix:
    """Rounds `[N, K]` so that its products with certain inputs change least; see `gptq.round_with_feedback`."""
    whole_rows = BlockFormat(8, matrix.shape[1])
    values = np.empty(matrix.shape, dtype=np.int8)
    scales = np.empty(len(matrix), dtype=np.float32)
    for start in range(0, len(matrix), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        rounded = round_with_feedback(matrix[rows], factor, whole_rows)
        values[rows] = (rounded.values.astype(np.int16) - 128).astype(np.int8)
        scales[rows] = np.maximum(rounded.scales[:, 0], np.float32(SMALLEST_SCALE))
    return ChannelMatrix(values, scales)


def calibrate_channels(
    config: ModelConfig, weights: Weights, folding: Folding, texts: Sequence[Sequence[int]], progress: Progress
) -> tuple[Weights, CalibratedChannels]:
    """Weights balanced for int8, which match the same folding, and what rounds them."""
    texts = [text[:TOKENS] for text in texts]
    moments = measure_moments(config, weights, folding, texts, progress)
    balanced = BalancedWeights(weights, config, folding, moments)
    return balanced, CalibratedChannels(config, CalibrationRun(config, balanced, folding, texts), moments.head)
