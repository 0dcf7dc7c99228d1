"""What a model whose residual stream was rotated still has to do at run time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.rows import ALL_TOKENS, LOGITS_ROWS, Rows


@dataclass(frozen=True, slots=True)
class Folding:
    """Matrices that the weights have been folded to match; without them, nothing is done.

    `head_transform` `[hidden, hidden]` is applied to the hidden states before the head, and `down_rotation`
    `[block, block]` to each block of down_proj's input.
    """

    head_transform: NDArray[np.float32] | None = None
    down_rotation: NDArray[np.float32] | None = None

    def begin(self, g: GraphBuilder, config: ModelConfig) -> None:
        """Adds the matrices."""
        if self.head_transform is not None:
            g.weight("head_transform", self.head_transform)
        if self.down_rotation is not None:
            g.weight("down_rotation", self.down_rotation)
            for rows in (ALL_TOKENS, LOGITS_ROWS):
                same = [0] * rows.dims  # in a Reshape, 0 keeps the axis
                blocks = [*same, -1, len(self.down_rotation)]
                g.constant(f"down_blocks/{rows.name}", np.array(blocks, dtype=np.int64))
                g.constant(f"down_rows/{rows.name}", np.array([*same, config.intermediate_size], dtype=np.int64))

    def rotate_down(self, g: GraphBuilder, value: str, name: str, rows: Rows) -> str:
        """The input of down_proj `[..., intermediate]`, each block rotated."""
        if self.down_rotation is None:
            return value
        value = g.node("Reshape", [value, f"down_blocks/{rows.name}"], f"{name}/blocks")
        value = g.node("MatMul", [value, "down_rotation"], f"{name}/rotated")
        return g.node("Reshape", [value, f"down_rows/{rows.name}"], f"{name}/rotated_rows")

    def before_head(self, g: GraphBuilder, hidden: str) -> str:
        """The hidden states `[rows, hidden]` as the head wants them."""
        if self.head_transform is None:
            return hidden
        return g.node("MatMul", [hidden, "head_transform"], "lm_head/rotated")
