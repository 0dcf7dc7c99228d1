"""The weights of a model whose values and gated products are in a basis that rounding harms less: same function."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.weights import Weights
from qwenonnx.quantize.balance import Double, balancing_matrices, balancing_scales
from qwenonnx.quantize.moments import Moments
from qwenonnx.quantize.rotation import rotate_blocks

Array = NDArray[np.float32]


class BalancedWeights:
    """Gives each tensor of `weights`, which match `folding`, as the balanced model needs it.

    In each group of heads that share keys and values, v_proj becomes M v_proj and o_proj's columns o_proj M^-1:
    attention mixes values of tokens, not their channels. Outputs of up_proj are scaled, and down_proj's columns by the
    inverse.
    """

    def __init__(self, weights: Weights, config: ModelConfig, folding: Folding, moments: Moments) -> None:
        self._weights = weights
        self._config = config
        self._rotation = folding.down_rotation
        self._moments = moments
        self._matrices: dict[int, list[tuple[Double, Double]]] = {}
        self._scales: dict[int, Array] = {}

    def tensor(self, name: str) -> Array:
        """One tensor of the balanced model."""
        value = self._weights.tensor(name)
        kind = name.rpartition(".")[0].rpartition(".")[2]
        if kind not in ("v_proj", "o_proj", "up_proj", "down_proj"):
            return value
        layer = int(name.split(".")[2])
        if kind == "v_proj":
            return self._value(value, layer)
        if kind == "o_proj":
            return self._output(value, layer)
        if kind == "up_proj":
            return np.asarray(value * self._scales_of(layer)[:, None])
        return self._rotated(self._unrotated(value) / self._scales_of(layer))

    def _value(self, value: Array, layer: int) -> Array:
        """Weight `[kv_size, hidden]` or bias `[kv_size]` of v_proj."""
        parts = np.split(np.asarray(value), self._config.num_kv_heads)
        matrices = self._matrices_of(layer)
        mixed = [matrix @ part for (matrix, _), part in zip(matrices, parts, strict=True)]
        return np.asarray(np.concatenate(mixed), dtype=np.float32)

    def _output(self, value: Array, layer: int) -> Array:
        heads = self._grouped(value)
        mixed = [heads[:, i] @ inverse for i, (_, inverse) in enumerate(self._matrices_of(layer))]
        return np.asarray(np.stack(mixed, axis=1).reshape(value.shape), dtype=np.float32)

    def _grouped(self, output: Array) -> Array:
        """o_proj `[hidden, kv_heads, heads of a group, head_dim]`."""
        return output.reshape(len(output), self._config.num_kv_heads, -1, self._config.head_dim)

    def _matrices_of(self, layer: int) -> list[tuple[Double, Double]]:
        if layer not in self._matrices:
            heads = self._grouped(self._weights.tensor(f"model.layers.{layer}.self_attn.o_proj.weight"))
            groups = (heads[:, i].reshape(-1, self._config.head_dim) for i in range(self._config.num_kv_heads))
            self._matrices[layer] = [
                balancing_matrices(moment, group.T @ group)
                for moment, group in zip(self._moments.values[layer], groups, strict=True)
            ]
        return self._matrices[layer]

    def _scales_of(self, layer: int) -> Array:
        if layer not in self._scales:
            down = self._unrotated(self._weights.tensor(f"model.layers.{layer}.mlp.down_proj.weight"))
            self._scales[layer] = balancing_scales(self._moments.gated[layer], np.square(down).sum(axis=0))
        return self._scales[layer]

    def _rotated(self, down: Array) -> Array:
        return down if self._rotation is None else rotate_blocks(down, self._rotation)

    def _unrotated(self, down: Array) -> Array:
        return down if self._rotation is None else rotate_blocks(np.asarray(down), self._rotation.T)
