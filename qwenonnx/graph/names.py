"""Names of the fused graph's inputs and outputs; imports nothing heavy, since the runtime uses it too."""

from __future__ import annotations

from qwenonnx.config import ModelConfig

STEP_INPUTS = ("input_ids", "seqlens_k", "total_sequence_length", "logits_rows")


def past_names(config: ModelConfig) -> list[str]:
    """Names of the cache inputs, in graph order."""
    return [f"past_key_values.{i}.{kind}" for i in range(config.num_layers) for kind in ("key", "value")]


def present_names(config: ModelConfig) -> list[str]:
    """Names of the cache outputs, in graph order."""
    return [f"present.{i}.{kind}" for i in range(config.num_layers) for kind in ("key", "value")]
