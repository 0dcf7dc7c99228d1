"""The weights of a model whose residual stream is rotated, norm gains folded in: same function, kinder numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.linear import EMBEDDING, HEAD
from qwenonnx.graph.weights import Weights
from qwenonnx.quantize.rotation import Rotation, down_block, hadamard, rotate_blocks

# Rows of a large matrix rotated at once, to bound the temporary memory.
ROWS_AT_ONCE = 16_384


class RotatedWeights:
    """Gives each tensor of `weights` as the rotated model needs it.

    With rotation R and norm gains g: linears that read the stream become W diag(g) R, linears that write to it
    R^T W, embedding rows E R, gains 1. The head stays E R too (one matrix for both), so the final gain moves into
    `folding.head_transform` = R^T diag(g) R. `folding.down_rotation` rotates blocks of down_proj's input.
    """

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        self._weights = weights
        self._rotation = Rotation(config.hidden_size)
        self._down_rotation = hadamard(down_block(config.intermediate_size))
        gain = weights.tensor("model.norm.weight")
        rotated = self._rotation.apply(np.eye(config.hidden_size, dtype=np.float32))
        transform = self._rotation.apply_to_columns(gain[:, None] * rotated)
        self.folding = Folding(head_transform=transform, down_rotation=self._down_rotation)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor of the rotated model."""
        value = self._weights.tensor(name)
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if name.endswith(".bias"):
            return value
        if name in (EMBEDDING, HEAD):
            return self._rotate_rows(value)
        if kind in ("q_proj", "k_proj", "v_proj"):
            return self._rotation.apply(value * self._gain(name, "input_layernorm"))
        if kind in ("gate_proj", "up_proj"):
            return self._rotation.apply(value * self._gain(name, "post_attention_layernorm"))
        if kind == "o_proj":
            return self._rotation.apply_to_columns(value)
        if kind == "down_proj":
            return rotate_blocks(self._rotation.apply_to_columns(value), self._down_rotation)
        if kind.endswith("norm"):
            return np.ones_like(value)
        raise KeyError(name)

    def _gain(self, name: str, norm: str) -> NDArray[np.float32]:
        layer = ".".join(name.split(".")[:3])
        return self._weights.tensor(f"{layer}.{norm}.weight")

    def _rotate_rows(self, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
        result = np.empty_like(matrix)
        for start in range(0, len(matrix), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            result[rows] = self._rotation.apply(matrix[rows])
        return result
