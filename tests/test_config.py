"""Reading a model's sizes from config.json."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import tiny_config

from qwenonnx.config import ModelConfig
from qwenonnx.errors import CheckpointError

PUBLISHED = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32_768,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "vocab_size": 151_936,
}
"""What Qwen2.5-0.5B-Instruct says of itself, as far as it matters."""


def read(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_hf({**PUBLISHED, **overrides}, "config.json")


def test_sizes_of_the_published_model() -> None:
    config = read()

    assert (config.head_dim, config.q_size, config.kv_size) == (64, 896, 128)
    assert config.kv_bytes_per_token == 24_576
    assert config.context_length == 32_768
    assert config.tie_word_embeddings


def test_what_is_written_is_read_back() -> None:
    for config in (read(), read(head_dim=32, tie_word_embeddings=False), ModelConfig.from_hf(tiny_config(), "c")):
        assert ModelConfig.from_hf(config.to_hf(), "config.json") == config


def test_missing_fields_get_the_documented_defaults() -> None:
    raw = {key: value for key, value in PUBLISHED.items() if key not in ("rms_norm_eps", "num_key_value_heads")}

    config = ModelConfig.from_hf(raw | {"tie_word_embeddings": None}, "config.json")

    assert config.rms_norm_eps == 1e-6
    assert config.num_kv_heads == 14
    assert not config.tie_word_embeddings


def test_rope_theta_is_found_where_newer_files_keep_it() -> None:
    raw = {key: value for key, value in PUBLISHED.items() if key != "rope_theta"}

    assert ModelConfig.from_hf(raw | {"rope_parameters": {"rope_theta": 5e5}}, "c").rope_theta == 5e5
    assert ModelConfig.from_hf(raw, "c").rope_theta == 10_000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"model_type": None}, "model_type is None"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"hidden_size": 0}, "hidden_size must be a positive number, but it is 0"),
        ({"hidden_size": "896"}, "hidden_size must be"),
        ({"vocab_size": True}, "vocab_size must be"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be"),
        ({"num_attention_heads": 15}, "15 attention heads cannot share 2"),
        ({"head_dim": 20}, "head_dim 20 is not a multiple of 16"),
        ({"max_position_embeddings": float("nan")}, "max_position_embeddings must be"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings must be"),
        ({"max_position_embeddings": 1_000_000_000}, "max_position_embeddings must be between 2 and 1,048,576"),
        ({"max_position_embeddings": 1}, "max_position_embeddings must be between 2"),
        ({"num_hidden_layers": 1_000_000_000}, "num_hidden_layers must be at most 1,024, but it is 1,000,000,000"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, but it is 'yes'"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "architectures is .*Classification"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has full_attention, sliding_attention"),
        ({"layer_types": 5}, "layer_types has 5"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters .* is not supported"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 1000000.0, but rope_parameters says 500000.0"),
        ({"hidden_size": 895.5}, "hidden_size must be a whole number, but it is 895.5"),
    ],
    ids=str,
)
def test_what_the_graph_does_not_have_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: .*{message}"):
        read(**overrides)


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_rope_scaling_that_scales_nothing_is_accepted(scaling: object) -> None:
    assert read(rope_scaling=scaling) == read()


def test_fields_that_say_the_usual_thing_are_accepted() -> None:
    usual = {
        "architectures": ["Qwen2ForCausalLM"],
        "layer_types": ["full_attention"] * 24,
        "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
    }

    assert read(**usual) == read()
