"""Which tensors a Qwen2 checkpoint must hold, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping

from qwenonnx.config import ModelConfig
from qwenonnx.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_NAMED_AT_MOST = 4


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face name, linears as `[out_features, in_features]`; the head only if untied."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, size in (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (size, hidden)
            shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, config.q_size)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def check_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Compares the tensors that a checkpoint has with what its configuration asks for.

    Raises:
        CheckpointError: tensors are missing (the first few are named), one has another shape, or there are layers
            that the configuration does not count.
    """
    surplus = next((name for name in found if name.startswith(f"model.layers.{config.num_layers}.")), None)
    if surplus is not None:
        raise CheckpointError(
            f"{where}: the configuration counts {config.num_layers} layers, but there is a tensor {surplus}; "
            "the weights and the configuration are not of the same model."
        )
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing == [HEAD]:
        raise CheckpointError(
            f"{where}: the configuration says tie_word_embeddings is false, but there is no {HEAD}; "
            "download the checkpoint again, or set tie_word_embeddings to true if its head is the embedding."
        )
    if missing:
        names = ", ".join(missing[:_NAMED_AT_MOST])
        more = f" and {len(missing) - _NAMED_AT_MOST} more" if len(missing) > _NAMED_AT_MOST else ""
        raise CheckpointError(
            f"{where}: {len(missing)} of {len(expected)} tensors are missing ({names}{more}); "
            "this is not a whole Qwen2 language model, so download it again."
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(found[name])}, but the configuration asks for "
                f"{list(shape)}; the weights and the configuration are not of the same model."
            )
