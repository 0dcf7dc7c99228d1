"""INT8 linears with one activation scale per token and one weight scale per output channel, all in stock operators.

A row x is quantized to `round(x / s) + 128` with s = max|x| / 127, so a token's result depends on no other token.
Products are integer sums (`MatMulIntegerToFloat`, `QGemm`); scales are applied after. One int8 matrix serves as
embedding (gathered rows) and as head (`QGemm` with the matrix transposed), with one scale per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.linear import (
    EMBEDDING,
    LinearStyle,
    Operand,
    Product,
    joined,
    scalar,
)
from qwenonnx.graph.rows import Rows
from qwenonnx.graph.weights import Weights

MS = "com.microsoft"
ZERO_POINT = 128
HEAD_PIECES = 4
# Keeps an all-zero row from dividing by zero; far below any scale that matters.
SMALLEST_SCALE = 1e-30


def quantize_rows(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Symmetric int8 of `[N, K]` with one scale per row: values in [-127, 127], scales `[N]`."""
    scale = np.maximum(np.abs(weight).max(axis=1) / np.float32(127), np.float32(SMALLEST_SCALE))
    return np.rint(weight / scale[:, None]).astype(np.int8), scale


@dataclass(frozen=True, slots=True)
class ChannelMatrix:
    """A quantized matrix `[N, K]`: values `[N, K]` in [-127, 127], scales `[N]`."""

    values: NDArray[np.int8]
    scales: NDArray[np.float32]

    def dequantized(self) -> NDArray[np.float32]:
        """The matrix that the stored one stands for, `[N, K]`."""
        return np.asarray(self.values * self.scales[:, None], dtype=np.float32)


class ChannelQuantizer(Protocol):
    """Decides to which values each matrix is rounded."""

    def quantize(self, name: str, matrix: NDArray[np.float32]) -> ChannelMatrix:
        """The stored form of a matrix `[N, K]`; called once for each, in the order of the graph."""

    def keep(self, name: str, names: Sequence[str], weights: Weights) -> None:
        """Is told, in its place in the order, of a linear of the tensors `names` that stays as it is."""


class NearestChannels:
    """Rounds every matrix to the nearest values."""

    def quantize(self, name: str, matrix: NDArray[np.float32]) -> ChannelMatrix:
        """The stored form of a matrix `[N, K]`."""
        return ChannelMatrix(*quantize_rows(matrix))

    def keep(self, name: str, names: Sequence[str], weights: Weights) -> None:
        """Does nothing: each matrix is rounded alone."""


class Int8Linears(LinearStyle):
    """The `int8` recipe's linears; matrices are rounded to the nearest values where there is no other `quantizer`."""

    def __init__(self, folding: Folding | None = None, quantizer: ChannelQuantizer | None = None) -> None:
        super().__init__(folding)
        self._quantizer = quantizer or NearestChannels()
        self._zero_points: set[Rows] = set()
        self._vocab = 0
        self._piece = 0
        self._width = 0
        self._head = EMBEDDING

    def share(self, g: GraphBuilder, config: ModelConfig) -> None:
        """Adds constants."""
        self._vocab = config.vocab_size
        self._piece = -(-config.vocab_size // HEAD_PIECES)
        self._width = config.hidden_size
        g.constant("one_column", np.array([1], dtype=np.int64))
        g.constant("one", scalar(1.0, np.float32))
        g.constant("zero_point", scalar(ZERO_POINT, np.uint8))
        g.constant("reciprocal_127", scalar(1 / 127, np.float32))
        g.constant("last_axis", np.array([-1], dtype=np.int64))

    def add_matrix(self, g: GraphBuilder, name: str, weights: Weights) -> None:
        """Adds it in int8, with a scale a row."""
        matrix = self._quantizer.quantize(name, weights.tensor(name))
        g.weight(name, matrix.values)
        g.weight(f"{name}_scale", matrix.scales)
        # QGemm wants zero points in the shape of the scales.
        g.weight(f"{name}_zero_point", np.zeros(len(matrix.scales), dtype=np.int8))
        self._head = name

    def embed(self, g: GraphBuilder, ids: str) -> str:
        """Gathers int8 rows and their scales."""
        name = "model.embed_tokens"
        rows = g.node("Gather", [EMBEDDING, ids], f"{name}/rows", attributes={"axis": 0})
        scales = g.node("Gather", [f"{EMBEDDING}_scale", ids], f"{name}/scales", attributes={"axis": 0})
        scales = g.node("Unsqueeze", [scales, "last_axis"], f"{name}/row_scales")
        rows = g.node("Cast", [rows], f"{name}/float_rows", attributes={"to": 1})
        return g.node("Mul", [rows, scales], name)

    def operand(
        self, g: GraphBuilder, value: str, name: str, *, width: int, rows: Rows, scale: str | None = None
    ) -> Operand:
        """Quantizes each row; the result's scale includes `scale`, by which the value itself is not multiplied.

        A row of zeros has the scale 0, so whatever it is quantized to, its products are 0.
        """
        magnitude = g.node("Abs", [value], f"{name}/abs")
        largest = g.node("ReduceMax", [magnitude, "last_axis"], f"{name}/max", attributes={"keepdims": 1})
        step = g.node("Mul", [largest, "reciprocal_127"], f"{name}/step")
        quantized = g.node(
            "QuantizeLinear",
            [value, step, self._zero_points_for(g, rows)],
            f"{name}/int8",
            attributes={"axis": -1, "block_size": width},  # one block a row: takes scales as they are, [..., 1]
        )
        if scale is not None:
            step = g.node("Mul", [step, scale], f"{name}/combined_scale")
        return Operand(quantized, step)

    def linear(self, g: GraphBuilder, x: Operand, names: Sequence[str], weights: Weights, name: str) -> Product:
        """An integer product with weights `[K, N]`; the row scale is left to the caller."""
        matrix = self._quantizer.quantize(name, joined(weights, names))
        weight = g.weight(f"{name}.weight", np.ascontiguousarray(matrix.values.T))
        columns = g.weight(f"{name}.weight_scale", matrix.scales)
        inputs = [x.value, weight, "one", columns, "zero_point"]
        return Product(g.node("MatMulIntegerToFloat", inputs, name, domain=MS), x.scale)

    def skip(self, names: Sequence[str], weights: Weights, name: str) -> None:
        """Lets a calibration go on with the weights as they are."""
        self._quantizer.keep(name, names, weights)

    def head(self, g: GraphBuilder, hidden: str, *, width: int, rows: Rows) -> str:
        """Logits from the int8 matrix `[vocab, hidden]`."""
        hidden = self._folding.before_head(g, hidden)
        x = self.operand(g, hidden, "lm_head/input", width=width, rows=rows)
        if x.scale is None:
            raise ValueError("an int8 operand has a scale")
        pieces = [self._head_piece(g, x.value, start) for start in range(0, self._vocab, self._piece)]
        product = g.node("Concat", pieces, "lm_head", attributes={"axis": 1}) if len(pieces) > 1 else pieces[0]
        return g.node("Mul", [product, x.scale], "logits")

    def _head_piece(self, g: GraphBuilder, quantized: str, start: int) -> str:
        """The product with some rows of the head, as a matrix of its own over the same bytes.

        onnxruntime transposes the weight of a QGemm into a temporary copy when it loads it; that of a piece is small.
        And it lets go of the file's pages when no other node uses the tensor, as the embedding's Gather would.
        """
        count = min(self._piece, self._vocab - start)
        name = f"lm_head/rows_{start}"
        width = self._width
        weight = g.alias(f"{name}.weight", self._head, (count, width), first_row=start)
        scale = g.alias(f"{name}.weight_scale", f"{self._head}_scale", (count,), first_row=start)
        zeros = g.alias(f"{name}.weight_zero_point", f"{self._head}_zero_point", (count,), first_row=start)
        inputs = [quantized, "one", "zero_point", weight, scale, zeros]
        return g.node("QGemm", inputs, name, domain=MS, attributes={"transB": 1})

    def _zero_points_for(self, g: GraphBuilder, rows: Rows) -> str:
        """Zero points `[..., 1]` for each row; made once."""
        name = f"zero_points/{rows.name}"
        if rows not in self._zero_points:
            counts = g.node("Shape", [rows.name], f"{name}/counts")
            shape = g.node("Concat", [counts, "one_column"], f"{name}/shape", attributes={"axis": 0})
            g.node("Expand", ["zero_point", shape], name)
            self._zero_points.add(rows)
        return name
