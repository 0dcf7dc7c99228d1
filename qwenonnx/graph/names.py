"""Names of the fused graph's inputs and outputs; imports nothing heavy, since the runtime uses it too."""

from __future__ import annotations

from qwenonnx.config import ModelConfig

STEP_INPUTS = (
    "input_ids",
    "logits_rows",
    "seqlens_k",
    "query_seqlens",
    "total_sequence_length",
    "lone_tokens",
    "head_rows",
    "output_rows",
    "position_ids",
    "attention_bias",
)


def past_names(config: ModelConfig) -> list[str]:
    """Names of the cache inputs, in graph order."""
    return [f"past_key_values.{i}.{kind}" for i in range(config.num_layers) for kind in ("key", "value")]


def present_names(config: ModelConfig) -> list[str]:
    """Names of the cache outputs, in graph order."""
    return [f"present.{i}.{kind}" for i in range(config.num_layers) for kind in ("key", "value")]
