"""The rotation of the residual stream, and a model's weights folded into it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from packages import TOKENS, ArrayWeights, small_model

from qwenonnx.config import ModelConfig
from qwenonnx.export.reference import reference_logits
from qwenonnx.graph.linear import EMBEDDING, HEAD
from qwenonnx.quantize.rotated_weights import RotatedWeights
from qwenonnx.quantize.rotation import Rotation, cosine_basis, down_block, hadamard, rotate_blocks

SIZES = (1, 7, 64, 96, 224, 896)


@pytest.mark.parametrize("size", SIZES)
def test_the_rotation_is_orthogonal(size: int) -> None:
    matrix = explicit(Rotation(size), size).astype(np.float64)

    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_applying_it_equals_the_explicit_matrix(size: int) -> None:
    rotation, rng = Rotation(size), np.random.default_rng(1)
    rows = rng.standard_normal((5, size)).astype(np.float32)
    matrix = explicit(rotation, size)

    np.testing.assert_allclose(rotation.apply(rows), rows @ matrix, atol=1e-4)
    np.testing.assert_allclose(rotation.apply_to_columns(rows.T.copy()), matrix.T @ rows.T, atol=1e-4)


def test_the_explicit_matrix_is_signs_times_cosine_times_hadamard() -> None:
    matrix = explicit(Rotation(896), 896)
    factors = np.kron(cosine_basis(7), hadamard(128))
    signs = matrix[:, 0] / factors[:, 0]

    np.testing.assert_allclose(np.abs(signs), 1, atol=1e-4)
    assert (signs > 0).any()
    assert (signs < 0).any()
    np.testing.assert_allclose(matrix, signs[:, None] * factors, atol=1e-5)


def test_one_large_channel_is_spread_over_all() -> None:
    rows = np.zeros((1, 896), dtype=np.float32)
    rows[0, 13] = 1000

    rotated = Rotation(896).apply(rows)

    assert np.abs(rotated).max() < 1000 * 2 / np.sqrt(896)
    np.testing.assert_allclose(np.linalg.norm(rotated), 1000, rtol=1e-5)


def test_every_run_gets_the_same_rotation() -> None:
    np.testing.assert_array_equal(explicit(Rotation(96), 96), explicit(Rotation(96), 96))


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_hadamard_holds_plus_and_minus_one(size: int) -> None:
    matrix = hadamard(size).astype(np.float64)

    np.testing.assert_allclose(np.abs(matrix) * np.sqrt(size), 1, rtol=1e-6)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-6)


def test_blocks_are_rotated_one_by_one() -> None:
    rows = np.random.default_rng(2).standard_normal((3, 12)).astype(np.float32)
    block = hadamard(4)

    rotated = rotate_blocks(rows, block)

    np.testing.assert_allclose(rotated, rows @ np.kron(np.eye(3), block), atol=1e-6)


@pytest.mark.parametrize(("width", "block"), [(4864, 128), (128, 128), (96, 32), (7, 1), (1024, 128)])
def test_the_block_before_down_proj_divides_its_width(width: int, block: int) -> None:
    assert down_block(width) == block


@pytest.mark.parametrize(
    "overrides",
    [{}, {"tie_word_embeddings": False}, {"hidden_size": 96, "head_dim": 32, "intermediate_size": 48}],
    ids=str,
)
def test_the_rotated_model_computes_the_same_function(overrides: dict[str, Any]) -> None:
    config, weights = small_model(**overrides)
    rotated = RotatedWeights(weights, config)

    logits = reference_logits(replace(config, tie_word_embeddings=False), RunTimeFolded(rotated, config), TOKENS)

    expected = reference_logits(config, weights, TOKENS)
    assert np.abs(logits - expected).max() < 1e-3
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        assert np.abs(rotated.tensor(name) - weights.tensor(name)).max() > 0.1


def test_rows_of_a_large_matrix_are_rotated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = small_model()
    whole = RotatedWeights(weights, config).tensor("model.embed_tokens.weight")
    monkeypatch.setattr("qwenonnx.quantize.rotated_weights.ROWS_AT_ONCE", 100)

    np.testing.assert_allclose(RotatedWeights(weights, config).tensor("model.embed_tokens.weight"), whole, atol=1e-6)


def test_a_tensor_that_no_rule_covers_is_not_passed_on_as_it_is() -> None:
    config, weights = small_model()
    extra = ArrayWeights({**weights.tensors, "model.layers.0.mlp.surprise.weight": np.ones((2, 2), dtype=np.float32)})

    with pytest.raises(KeyError, match="surprise"):
        RotatedWeights(extra, config).tensor("model.layers.0.mlp.surprise.weight")


def explicit(rotation: Rotation, size: int) -> NDArray[np.float32]:
    return rotation.apply(np.eye(size, dtype=np.float32))


class RunTimeFolded:
    """The rotated model as the plain reference can run it, with a head of its own.

    What the graph does to activations at run time (the block rotation before down_proj, the transform before the
    head) is done to the weights instead.
    """

    def __init__(self, rotated: RotatedWeights, config: ModelConfig) -> None:
        transform, rotation = rotated.folding.head_transform, rotated.folding.down_rotation
        assert transform is not None
        assert rotation is not None
        self._rotated, self._transform, self._rotation = rotated, transform, rotation
        self._head = EMBEDDING if config.tie_word_embeddings else HEAD

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name == HEAD:
            return self._rotated.tensor(self._head) @ self._transform.T
        value = self._rotated.tensor(name)
        if name.endswith("down_proj.weight"):
            return rotate_blocks(value, self._rotation.T.copy())
        return value
