"""Linears whose weights are stored in blocks of 4 or 8 bits, one scale a block: `com.microsoft.MatMulNBits`.

A block of `block_size` weights along the input shares a scale; values are unsigned with the zero point 2^(bits-1).
With `accuracy_level` 4 the operator quantizes its input to int8 a block at a time, so that an outlier spoils one block
only; without it, the 8-bit form would dequantize the whole weight at every call (onnxruntime 1.32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.linear import EMBEDDING, LinearStyle, Operand, Product, joined
from qwenonnx.graph.rows import Rows
from qwenonnx.graph.weights import Weights

MS = "com.microsoft"
ACCURACY_LEVEL = 4


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a matrix is stored: bits a weight, and weights a scale."""

    bits: int
    block_size: int


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A quantized matrix `[N, K]`: values `[N, K]` in [0, 2^bits), scales `[N, K / block_size]`."""

    values: NDArray[np.uint8]
    scales: NDArray[np.float32]
    format: BlockFormat

    def packed(self) -> NDArray[np.uint8]:
        """The operator's layout `[N, K / block_size, block_size * bits / 8]`, the lower nibble first."""
        blocks = self.values.reshape(len(self.values), -1, self.format.block_size)
        if self.format.bits == 8:
            return blocks
        return np.asarray(blocks[..., 0::2] | (blocks[..., 1::2] << 4), dtype=np.uint8)

    def dequantized(self) -> NDArray[np.float32]:
        """The matrix that the stored one stands for, `[N, K]`."""
        zero = 1 << (self.format.bits - 1)
        blocks = self.values.reshape(len(self.values), -1, self.format.block_size).astype(np.float32) - zero
        return np.asarray(blocks * self.scales[..., None]).reshape(self.values.shape)


class BlockQuantizer(Protocol):
    """Decides how each matrix is stored, and with which values."""

    def quantize(self, name: str, matrix: NDArray[np.float32]) -> BlockMatrix:
        """The stored form of a matrix `[N, K]`; called once for each, in the order of the graph."""

    def keep(self, name: str, names: Sequence[str], weights: Weights) -> None:
        """Is told, in its place in the order, of a linear of the tensors `names` that stays as it is."""


class BlockLinears(LinearStyle):
    """Linears as `MatMulNBits`, and one matrix for embedding (`GatherBlockQuantized`) and head where they are tied."""

    def __init__(self, quantizer: BlockQuantizer, folding: Folding | None = None) -> None:
        self._quantizer = quantizer
        super().__init__(folding)
        self._formats: dict[str, BlockFormat] = {}
        self._vocab = 0
        self._head = EMBEDDING

    def add_matrix(self, g: GraphBuilder, name: str, weights: Weights) -> None:
        """Adds it in blocks."""
        matrix = self._quantizer.quantize(name, weights.tensor(name))
        packed = matrix.packed()
        self._formats[name] = matrix.format
        self._vocab, self._head = len(packed), name
        g.weight(name, packed.reshape(len(packed), -1))
        g.weight(f"{name}_scale", matrix.scales)
        g.alias(f"{name}_blocks", name, packed.shape)

    def embed(self, g: GraphBuilder, ids: str) -> str:
        """Gathers rows and dequantizes them."""
        storage = self._formats[EMBEDDING]
        return g.node(
            "GatherBlockQuantized",
            [EMBEDDING, ids, f"{EMBEDDING}_scale"],
            "model.embed_tokens",
            domain=MS,
            attributes={
                "bits": storage.bits,
                "block_size": storage.block_size,
                "gather_axis": 0,
                "quantize_axis": 1,
            },
        )

    def linear(self, g: GraphBuilder, x: Operand, names: Sequence[str], weights: Weights, name: str) -> Product:
        """A product with a matrix in blocks."""
        matrix = self._quantizer.quantize(name, joined(weights, names))
        weight = g.weight(f"{name}.weight", matrix.packed())
        scale = g.weight(f"{name}.weight_scale", matrix.scales)
        return Product(_product(g, x.value, weight, scale, matrix.values.shape, matrix.format, name))

    def skip(self, names: Sequence[str], weights: Weights, name: str) -> None:
        """Lets a calibration go on with the weights as they are."""
        self._quantizer.keep(name, names, weights)

    def head(self, g: GraphBuilder, hidden: str, *, width: int, rows: Rows) -> str:
        """Logits from the matrix `[vocab, hidden]`."""
        hidden = self._folding.before_head(g, hidden)
        names = f"{self._head}_blocks", f"{self._head}_scale"
        return _product(g, hidden, *names, (self._vocab, width), self._formats[self._head], "logits")


def _product(
    g: GraphBuilder, x: str, weight: str, scale: str, shape: tuple[int, ...], storage: BlockFormat, name: str
) -> str:
    attributes = {
        "N": shape[0],
        "K": shape[1],
        "bits": storage.bits,
        "block_size": storage.block_size,
        "accuracy_level": ACCURACY_LEVEL,
    }
    return g.node("MatMulNBits", [x, weight, scale], name, domain=MS, attributes=attributes)
