"""Rotary position embedding tables (RoFormer, arXiv 2104.09864), in the form GroupQueryAttention reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.graph.heads import lone_query_rows


def rotary_tables(config: ModelConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine tables `[positions, head_dim / 2]`, computed in double precision.

    There are as many positions more than the context has as attention gets rows beside the tokens.
    """
    positions = config.context_length + lone_query_rows(config)
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    angles = np.outer(np.arange(positions, dtype=np.float64), config.rope_theta**-half)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
