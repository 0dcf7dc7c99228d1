"""How many query rows attention gets for a token; imports nothing heavy, since the runtime uses it too."""

from __future__ import annotations

from qwenonnx.config import ModelConfig


def lone_query_rows(config: ModelConfig) -> int:
    """Query rows that a token of its own becomes for each key head, two at least.

    As many positions behind the context's last are needed in the rotary tables and in the cache.
    """
    return max(2, config.num_heads // config.num_kv_heads)
