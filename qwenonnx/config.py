"""The architecture of a Qwen2 model, as read from a checkpoint's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwenonnx.errors import CheckpointError

MAX_CONTEXT = 1 << 20
"""Longest context in tokens: the graph holds sines and cosines for each position."""
_MAX_LAYERS = 1024
_ARCHITECTURE = "Qwen2ForCausalLM"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a Qwen2 decoder.

    `vocab_size` counts the rows of the embedding matrix; the tokenizer may define fewer tokens (padding rows).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    context_length: int
    tie_word_embeddings: bool

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (or value) projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of fp32 KV cache that one token takes over all layers."""
        return self.num_layers * 2 * self.kv_size * 4

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str) -> ModelConfig:
        """Reads the Hugging Face form of the configuration; `where` names the file in messages.

        Raises:
            CheckpointError: the architecture is not Qwen2, a field is missing or wrong, or the checkpoint uses
                a feature that the graph does not have (sliding-window attention, rope scaling, another head).
        """
        model_type = config.get("model_type")
        if model_type != "qwen2":
            raise CheckpointError(
                f"{where}: model_type is {model_type!r}, but only 'qwen2' checkpoints (Qwen2, Qwen2.5) can be used."
            )
        architectures = config.get("architectures")
        if architectures and architectures != [_ARCHITECTURE]:
            raise CheckpointError(
                f"{where}: architectures is {architectures!r}, but only {[_ARCHITECTURE]!r}, a text model, can be used."
            )
        if config.get("use_sliding_window"):
            raise CheckpointError(f"{where}: use_sliding_window is on, which the exported graph does not support.")
        layer_types = config.get("layer_types")
        kinds = sorted(set(map(str, layer_types))) if isinstance(layer_types, list) else [layer_types]
        if layer_types and kinds != ["full_attention"]:
            raise CheckpointError(
                f"{where}: layer_types has {', '.join(map(str, kinds))}, but the exported graph has full_attention "
                "only."
            )
        if config.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"{where}: hidden_act is {config['hidden_act']!r}, but Qwen2 uses 'silu'.")
        fields = {**config, "rope_theta": _rope_theta(config, where)}

        def number(name: str, default: Any = None) -> float:
            value = fields.get(name)
            value = default if value is None else value
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise CheckpointError(f"{where}: {name} must be a positive number, but it is {value!r}.")
            return value

        def whole(name: str, default: Any = None) -> int:
            value = number(name, default)
            if value != int(value):
                raise CheckpointError(f"{where}: {name} must be a whole number, but it is {value!r}.")
            return int(value)

        tied = config.get("tie_word_embeddings")
        if not isinstance(tied, bool | None):
            raise CheckpointError(f"{where}: tie_word_embeddings must be true or false, but it is {tied!r}.")
        heads = whole("num_attention_heads")
        hidden = whole("hidden_size")
        result = cls(
            vocab_size=whole("vocab_size"),
            hidden_size=hidden,
            intermediate_size=whole("intermediate_size"),
            num_layers=whole("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=whole("num_key_value_heads", heads),
            head_dim=whole("head_dim", hidden // heads),
            rms_norm_eps=float(number("rms_norm_eps", 1e-6)),
            rope_theta=float(number("rope_theta", 10_000.0)),
            context_length=whole("max_position_embeddings"),
            tie_word_embeddings=bool(tied),
        )
        if not 2 <= result.context_length <= MAX_CONTEXT:
            raise CheckpointError(
                f"{where}: max_position_embeddings must be between 2 and {MAX_CONTEXT:,}, but it is "
                f"{result.context_length:,}."
            )
        if result.num_layers > _MAX_LAYERS:
            raise CheckpointError(
                f"{where}: num_hidden_layers must be at most {_MAX_LAYERS:,}, but it is {result.num_layers:,}."
            )
        if result.num_heads % result.num_kv_heads:
            raise CheckpointError(
                f"{where}: {result.num_heads} attention heads cannot share {result.num_kv_heads} key/value heads."
            )
        if result.head_dim % 16:
            raise CheckpointError(
                f"{where}: head_dim {result.head_dim} is not a multiple of 16, which the attention kernel needs."
            )
        return result

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face form, complete enough for transformers to read it back."""
        return {
            "architectures": [_ARCHITECTURE],
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.context_length,
            "model_type": "qwen2",
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


def _rope_theta(config: Mapping[str, Any], where: str) -> Any:
    """The base of the rotary frequencies, which older files keep by itself and newer ones in `rope_parameters`.

    Raises:
        CheckpointError: the frequencies are scaled, or the two places disagree.
    """
    for name in ("rope_scaling", "rope_parameters"):
        scaling = config.get(name)
        if not isinstance(scaling, Mapping | None):
            raise CheckpointError(f"{where}: {name} must be an object, but it is {scaling!r}.")
        if scaling and scaling.get("rope_type", scaling.get("type")) not in (None, "default"):
            raise CheckpointError(f"{where}: {name} {scaling!r} is not supported; remove it to use the native context.")
    alone, inside = config.get("rope_theta"), (config.get("rope_parameters") or {}).get("rope_theta")
    if alone is not None and inside is not None and alone != inside:
        raise CheckpointError(
            f"{where}: rope_theta is {alone!r}, but rope_parameters says {inside!r}; correct the one that is wrong."
        )
    return inside if alone is None else alone
