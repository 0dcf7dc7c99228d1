"""Running a model in numpy, layer by layer, on calibration texts while it is being quantized.

Each linear sees the inputs that the already quantized linears before it give, as it will when the model is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.linear import EMBEDDING
from qwenonnx.graph.weights import Weights
from qwenonnx.quantize.rotation import rotate_blocks

Array = NDArray[np.float32]


class CalibrationRun:
    """The hidden states of all calibration tokens, advanced linear by linear in the order of the graph.

    For each linear ask for its `inputs`, or for `gram`, their Gram matrix `[K, K]`; then tell `advance` the weight that
    it got.
    Linears are named as in the graph: `model.layers.{i}.self_attn.qkv_proj`, `…o_proj`, `….mlp.gate_proj`, `…up_proj`,
    `…down_proj`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, folding: Folding, texts: Sequence[Sequence[int]]) -> None:
        self._config = config
        self._weights = weights
        self._folding = folding
        self._bounds = np.cumsum([0, *(len(text) for text in texts)])
        ids = np.concatenate([np.asarray(text) for text in texts])
        self.hidden: Array = np.ascontiguousarray(weights.tensor(EMBEDDING)[ids])
        self._input: Array = np.empty((0, 0), dtype=np.float32)
        self._gate: Array = self._input
        self._gram: Array = self._input
        self._cos, self._sin = self._rotary()

    def inputs(self, name: str) -> Array:
        """The inputs `[tokens, K]` of a linear."""
        layer, _, kind = name.rpartition(".")
        block = layer.rpartition(".")[0]
        if kind == "qkv_proj":
            self._input = self._normed(f"{block}.input_layernorm.weight")
        elif kind == "gate_proj":
            self._input = self._normed(f"{block}.post_attention_layernorm.weight")
        return self._input

    def gram(self, name: str) -> Array:
        """The sum of the outer products of the inputs of a linear."""
        inputs = self.inputs(name)
        if not name.endswith("up_proj"):  # it has the same inputs as gate_proj
            self._gram = inputs.T @ inputs
        return self._gram

    def head_inputs(self) -> Array:
        """The inputs `[tokens, hidden]` of the head, after the last layer."""
        hidden = self._normed("model.norm.weight")
        transform = self._folding.head_transform
        return hidden if transform is None else hidden @ transform

    def advance(self, name: str, weight: Array) -> None:
        """Goes on with the linear's weight `[N, K]` as it will be used."""
        layer, _, kind = name.rpartition(".")
        output = self._input @ weight.T
        if kind == "qkv_proj":
            bias = [self._weights.tensor(f"{layer}.{part}_proj.bias") for part in "qkv"]
            self._input = self._attention(output + np.concatenate(bias))
        elif kind in ("o_proj", "down_proj"):
            self.hidden += output
        elif kind == "gate_proj":
            with np.errstate(over="ignore"):
                self._gate = output / (1 + np.exp(-output))
        else:
            gated = self._gate * output
            rotation = self._folding.down_rotation
            self._input = gated if rotation is None else rotate_blocks(gated, rotation)

    def _normed(self, gain: str) -> Array:
        hidden = self.hidden
        variance = np.mean(np.square(hidden), axis=-1, keepdims=True, dtype=np.float64)
        return np.asarray(
            hidden / np.sqrt(variance + self._config.rms_norm_eps) * self._weights.tensor(gain), np.float32
        )

    def _attention(self, qkv: Array) -> Array:
        config = self._config
        output = np.empty((len(qkv), config.q_size), dtype=np.float32)
        group = config.num_heads // config.num_kv_heads
        for start, stop in zip(self._bounds[:-1], self._bounds[1:], strict=True):
            heads = qkv[start:stop].reshape(stop - start, -1, config.head_dim).transpose(1, 0, 2)
            query, key, value = np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads])
            query, key = self._rotate(query), np.repeat(self._rotate(key), group, axis=0)
            scores = query @ key.transpose(0, 2, 1) / np.float32(np.sqrt(config.head_dim))
            scores += np.triu(np.full(scores.shape[1:], -np.inf, dtype=np.float32), k=1)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            mixed = scores @ np.repeat(value, group, axis=0)
            output[start:stop] = mixed.transpose(1, 0, 2).reshape(stop - start, -1)
        return output

    def _rotary(self) -> tuple[Array, Array]:
        longest = int(np.diff(self._bounds).max())
        half = np.arange(0, self._config.head_dim, 2) / self._config.head_dim
        angles = np.outer(np.arange(longest), self._config.rope_theta**-half)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def _rotate(self, heads: Array) -> Array:
        cos, sin = self._cos[: heads.shape[1]], self._sin[: heads.shape[1]]
        first, second = np.split(heads, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
