"""Rotary position embedding tables (RoFormer, arXiv 2104.09864), in the form GroupQueryAttention reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig


def rotary_tables(config: ModelConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine tables `[context_length, head_dim / 2]`, computed in double precision."""
    half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    angles = np.outer(np.arange(config.context_length, dtype=np.float64), config.rope_theta**-half)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
