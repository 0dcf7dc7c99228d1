"""Qwen2 in plain numpy: slow, short, and independent of the exported graph that it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.graph.weights import Weights

Array = NDArray[np.float32]


def reference_logits(config: ModelConfig, weights: Weights, token_ids: Sequence[int]) -> Array:
    """Logits `[n, vocab]` of a text of n tokens, computed layer by layer; weights are read one at a time.

    Weights that are not finite, or too large, give logits that are not finite, without a warning.
    """
    with np.errstate(all="ignore"):
        return _logits(config, weights, token_ids)


def _logits(config: ModelConfig, weights: Weights, token_ids: Sequence[int]) -> Array:
    embedding = weights.tensor("model.embed_tokens.weight")
    ids = np.asarray(token_ids)
    hidden = embedding[ids]
    cos, sin = _rotary(config, len(ids))
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}"
        x = _rms_norm(hidden, weights.tensor(f"{prefix}.input_layernorm.weight"), config.rms_norm_eps)
        hidden = hidden + _attention(config, weights, f"{prefix}.self_attn", x, cos, sin)
        x = _rms_norm(hidden, weights.tensor(f"{prefix}.post_attention_layernorm.weight"), config.rms_norm_eps)
        hidden = hidden + _mlp(weights, f"{prefix}.mlp", x)
    hidden = _rms_norm(hidden, weights.tensor("model.norm.weight"), config.rms_norm_eps)
    head = embedding if config.tie_word_embeddings else weights.tensor("lm_head.weight")
    return hidden @ head.T


def _rms_norm(x: Array, gain: Array, epsilon: float) -> Array:
    variance = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(variance + epsilon) * gain, dtype=np.float32)


def _attention(config: ModelConfig, weights: Weights, prefix: str, x: Array, cos: Array, sin: Array) -> Array:
    def project(kind: str, heads: int) -> Array:
        name = f"{prefix}.{kind}_proj"
        flat = x @ weights.tensor(f"{name}.weight").T + weights.tensor(f"{name}.bias")
        return flat.reshape(len(x), heads, config.head_dim).transpose(1, 0, 2)

    query = _rotate(project("q", config.num_heads), cos, sin)
    group = config.num_heads // config.num_kv_heads
    key = np.repeat(_rotate(project("k", config.num_kv_heads), cos, sin), group, axis=0)
    value = np.repeat(project("v", config.num_kv_heads), group, axis=0)
    scores = query @ key.transpose(0, 2, 1) / np.float32(np.sqrt(config.head_dim))
    future = np.triu(np.ones(scores.shape[1:], dtype=bool), k=1)
    scores = np.where(future, np.float32(-np.inf), scores)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = (scores / scores.sum(axis=-1, keepdims=True)) @ value
    flat = mixed.transpose(1, 0, 2).reshape(len(x), config.q_size)
    return np.asarray(flat @ weights.tensor(f"{prefix}.o_proj.weight").T)


def _mlp(weights: Weights, prefix: str, x: Array) -> Array:
    gate = x @ weights.tensor(f"{prefix}.gate_proj.weight").T
    up = x @ weights.tensor(f"{prefix}.up_proj.weight").T
    # Where exp is of a large number, it is infinite, and 1 / inf is the right 0.
    activated = gate / (1 + np.exp(-gate)) * up
    return np.asarray(activated @ weights.tensor(f"{prefix}.down_proj.weight").T)


def _rotary(config: ModelConfig, length: int) -> tuple[Array, Array]:
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.outer(np.arange(length), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
