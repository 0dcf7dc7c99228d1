"""Where a graph's weights come from."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.files import Progress


class Weights(Protocol):
    """Named fp32 tensors of a Qwen2 model, under the checkpoint's names."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor; linears are `[out_features, in_features]`."""


class WatchedWeights:
    """Passes tensors on and reports how many bytes of the model have been asked for."""

    def __init__(self, weights: Weights, config: ModelConfig, progress: Progress | None) -> None:
        self._weights = weights
        self._total = fp32_bytes(config)
        self._progress = progress
        self._done = 0

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor of the underlying weights."""
        value = self._weights.tensor(name)
        self._done += value.nbytes
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)
        return value


def fp32_bytes(config: ModelConfig) -> int:
    """Bytes of all weights in fp32, a tied matrix counted once."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    qkv = config.q_size + 2 * config.kv_size
    layer = hidden * qkv + qkv + config.q_size * hidden + 3 * hidden * mlp + 2 * hidden
    matrices = 1 if config.tie_word_embeddings else 2
    return 4 * (config.num_layers * layer + hidden + matrices * config.vocab_size * hidden)
