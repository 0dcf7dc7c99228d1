"""Rounding the matrices of a model to blocks, to the nearest values or with calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from qwenonnx.graph.blocks import BlockFormat, BlockMatrix
from qwenonnx.graph.linear import EMBEDDING, HEAD, joined
from qwenonnx.graph.weights import Weights
from qwenonnx.quantize.block_scales import round_to_blocks
from qwenonnx.quantize.calibration import CalibrationRun
from qwenonnx.quantize.gptq import inverse_factor, round_with_feedback

Array = NDArray[np.float32]


class NearestBlocks:
    """Rounds every matrix to the nearest values, embedding and head in a format of their own."""

    def __init__(
        self, linears: BlockFormat, embedding: BlockFormat, special: Mapping[str, BlockFormat] | None = None
    ) -> None:
        self._linears = linears
        self._embedding = embedding
        self._special = special or {}

    def storage(self, name: str, width: int) -> BlockFormat:
        """The format of a matrix of that width; blocks that do not divide it are halved until they do."""
        kind = name.rpartition(".")[2]
        wanted = self._embedding if name in (EMBEDDING, HEAD) else self._special.get(kind, self._linears)
        return BlockFormat(wanted.bits, math.gcd(wanted.block_size, width))

    def quantize(self, name: str, matrix: Array) -> BlockMatrix:
        """The stored form of a matrix `[N, K]`."""
        return round_to_blocks(matrix, self.storage(name, matrix.shape[1]))

    def keep(self, name: str, names: Sequence[str], weights: Weights) -> None:
        """Does nothing: each matrix is rounded alone."""


class CalibratedBlocks:
    """Rounds linears with GPTQ on the inputs that a calibration run gives them; embedding and head to the nearest."""

    def __init__(self, nearest: NearestBlocks, run: CalibrationRun) -> None:
        self._nearest = nearest
        self._run = run
        self._gram: Array | None = None
        self._factor: Array | None = None

    def quantize(self, name: str, matrix: Array) -> BlockMatrix:
        """The stored form of a matrix `[N, K]`; linears must come in the order of the graph."""
        if name in (EMBEDDING, HEAD):
            return self._nearest.quantize(name, matrix)
        gram = self._run.gram(name)
        if self._factor is None or gram is not self._gram:
            self._gram, self._factor = gram, inverse_factor(gram)
        result = round_with_feedback(matrix, self._factor, self._nearest.storage(name, matrix.shape[1]))
        self._run.advance(name, result.dequantized())
        return result

    def keep(self, name: str, names: Sequence[str], weights: Weights) -> None:
        """Runs the calibration texts through a linear that stays in fp32."""
        self._run.gram(name)
        self._run.advance(name, joined(weights, names))
