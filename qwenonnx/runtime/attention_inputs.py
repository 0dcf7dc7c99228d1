"""The graph's inputs that lay tokens out for attention; see `graph.attention` for what the graph does with them.

Every product of attention is given two query rows or more. onnxruntime computes a lone row by another kernel, whose
last bits differ, so a token would not get the same result from a step of its own as from a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.graph.heads import lone_query_rows

HIDDEN_SCORE = np.float32(-1e30)


def attention_inputs(config: ModelConfig, counts: Sequence[int], starts: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Inputs for a step in which row i of the cache gets `counts[i]` (>= 0) tokens at positions from `starts[i]` on.

    Tokens lie behind each other, row by row. A row with 0 tokens keeps its `starts[i]` (>= 1) tokens.
    """
    numbers, begins = np.asarray(counts, dtype=np.int64), np.asarray(starts, dtype=np.int64)
    if bool((numbers == 1).all()):
        return _lone_tokens(config, begins)
    return _chunks(config, numbers, begins)


def _lone_tokens(config: ModelConfig, starts: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """One token a row: the query heads of a key head become rows of one product over the same keys.

    Their own keys take the places behind the token and are hidden from them, until the next step overwrites them.
    """
    kv, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    rows, vectors, count = lone_query_rows(config), config.num_heads + 2 * kv, len(starts)
    token = np.arange(count)[:, None, None]
    query = np.arange(kv) * group + np.minimum(np.arange(rows), group - 1)[:, None]
    heads = np.concatenate([query, np.broadcast_to(np.arange(config.num_heads, vectors), (rows, 2 * kv))], axis=1)
    head = np.arange(config.num_heads)
    total = int(starts.max()) + rows
    bias = np.zeros((count, 1, rows, total), dtype=np.float32)
    for row, start in enumerate(starts):
        bias[row, :, :, start + 1 :] = HIDDEN_SCORE
    return {
        "lone_tokens": np.array([True]),
        "head_rows": token * vectors + heads,
        "output_rows": (token[..., 0] * rows + head % group) * kv + head // group,
        "position_ids": np.repeat(starts[:, None], rows, axis=1),
        "attention_bias": bias,
        **_lengths(starts + rows, np.full(count, rows), total),
    }


def _chunks(config: ModelConfig, counts: NDArray[np.int64], starts: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Chunks of any length, filled up to the longest by their last token, which comes once more at least."""
    width, vectors = int(counts.max()) + 1, config.num_heads + 2 * config.num_kv_heads
    firsts = np.cumsum(counts) - counts
    tokens = firsts[:, None] + np.minimum(np.arange(width), np.maximum(counts - 1, 0)[:, None])
    places = np.concatenate([row * width + np.arange(count) for row, count in enumerate(counts)])
    valid = np.where(counts > 0, counts + 1, 0)
    total = max(int((starts + valid).max()), width)
    return {
        "lone_tokens": np.array([False]),
        "head_rows": np.minimum(tokens, counts.sum() - 1)[..., None] * vectors + np.arange(vectors),
        "output_rows": places[:, None] * config.num_heads + np.arange(config.num_heads),
        "position_ids": np.zeros((len(counts), 1), dtype=np.int64),
        "attention_bias": np.zeros((1, 1, 1, 1), dtype=np.float32),
        **_lengths(starts + valid, valid, total),
    }


def _lengths(ends: NDArray[np.int64], queries: NDArray[np.int64], total: int) -> dict[str, NDArray[Any]]:
    return {
        "seqlens_k": (ends - 1).astype(np.int32),
        "query_seqlens": queries.astype(np.int32),
        "total_sequence_length": np.array([total], dtype=np.int32),
    }
