"""Rotary tables."""

from __future__ import annotations

import math

import numpy as np
from packages import small_model

from qwenonnx.graph.heads import lone_query_rows
from qwenonnx.graph.rope import rotary_tables


def test_tables_hold_cosine_and_sine_of_position_times_frequency() -> None:
    config, _ = small_model(rope_theta=1e6, head_dim=32)

    cos, sin = rotary_tables(config)

    assert cos.shape == sin.shape == (config.context_length + lone_query_rows(config), 16)
    for position in (0, 1, 17, config.context_length - 1):
        for pair in (0, 1, 15):
            angle = position * 1e6 ** (-2 * pair / 32)
            assert math.isclose(cos[position, pair], math.cos(angle), abs_tol=1e-7)
            assert math.isclose(sin[position, pair], math.sin(angle), abs_tol=1e-7)


def test_long_contexts_keep_full_precision() -> None:
    config, _ = small_model(max_position_embeddings=32_768)

    cos, sin = rotary_tables(config)

    # In single precision the angle of the last position would be off by about 1e-3.
    assert abs(cos[32_767, 0] - math.cos(32_767)) < 1e-7
    np.testing.assert_allclose(cos**2 + sin**2, 1, atol=1e-6)
