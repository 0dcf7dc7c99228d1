"""Balancing changes no function, and makes rounding less harmful."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from packages import ArrayWeights, no_progress, small_model

from qwenonnx.export.reference import reference_logits
from qwenonnx.graph.folding import Folding
from qwenonnx.quantize.balance import balancing_matrices, balancing_scales
from qwenonnx.quantize.balanced_weights import BalancedWeights
from qwenonnx.quantize.calibration import CalibrationRun
from qwenonnx.quantize.moments import layer_linears, measure_moments
from qwenonnx.quantize.rotated_weights import RotatedWeights

TEXTS = [[5, 9, 301, 44, 7, 7, 120], [3, 250, 18]]


def moment(size: int, seed: int) -> NDArray[np.float64]:
    """A second moment with a few large directions."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((4 * size, size)) * np.geomspace(1, 30, size)
    return np.asarray(rows.T @ rows / len(rows))


@pytest.mark.parametrize("size", [16, 24])
def test_balancing_matrices_are_inverse_and_make_rounding_less_harmful(size: int) -> None:
    inputs, weights = moment(size, 0), moment(size, 1)[::-1, ::-1]

    matrix, inverse = balancing_matrices(inputs, weights)

    np.testing.assert_allclose(matrix @ inverse, np.eye(size), atol=1e-9)
    after = np.trace(matrix @ inputs @ matrix.T) * np.trace(inverse.T @ weights @ inverse)
    assert after < 0.5 * np.trace(inputs) * np.trace(weights)


def test_a_balanced_input_has_its_energy_spread_over_all_channels() -> None:
    inputs, weights = moment(16, 0), np.eye(16)

    matrix, _ = balancing_matrices(inputs, weights)

    energy = np.diagonal(matrix @ inputs @ matrix.T)
    assert energy.max() / energy.mean() < 4 < np.diagonal(inputs).max() / np.diagonal(inputs).mean()


def test_balancing_scales_are_the_best_of_all_scales() -> None:
    inputs, weights = np.geomspace(1, 100, 12), np.geomspace(50, 2, 12)
    scales = balancing_scales(inputs, weights).astype(np.float64)

    def harm(scales: NDArray[np.float64]) -> float:
        return float((inputs * scales**2).sum() * (weights / scales**2).sum())

    random = np.random.default_rng(0)
    assert harm(scales) < 0.7 * harm(np.ones(12))
    assert all(harm(scales * random.uniform(0.8, 1.25, 12)) > harm(scales) for _ in range(20))


def test_channels_that_calibration_never_used_stay_finite() -> None:
    assert np.isfinite(balancing_scales(np.array([0.0, 4.0]), np.array([3.0, 0.0]))).all()
    assert (balancing_scales(np.zeros(3), np.zeros(3)) == 1).all()
    for matrix in balancing_matrices(np.zeros((4, 4)), np.ones((4, 4))):
        assert np.isfinite(matrix).all()


def test_balanced_weights_are_the_same_model() -> None:
    config, weights = small_model()
    moments = measure_moments(config, weights, Folding(), TEXTS, no_progress(""))

    balanced = BalancedWeights(weights, config, Folding(), moments)

    for name in ("self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"):
        name = f"model.layers.1.{name}"
        assert np.abs(balanced.tensor(name) / weights.tensor(name) - 1).max() > 0.1
    for text in TEXTS:
        expected = reference_logits(config, weights, text)
        np.testing.assert_allclose(reference_logits(config, balanced, text), expected, atol=1e-4)


def test_rotated_weights_can_be_balanced() -> None:
    config, weights = small_model()
    rotated = RotatedWeights(weights, config)
    moments = measure_moments(config, rotated, rotated.folding, TEXTS, no_progress(""))

    hidden = [
        run_through(CalibrationRun(config, used, rotated.folding, TEXTS), used, config.num_layers)
        for used in (rotated, BalancedWeights(rotated, config, rotated.folding, moments))
    ]

    np.testing.assert_allclose(hidden[1], hidden[0], atol=1e-4)


def test_moments_are_those_of_the_unrotated_inputs() -> None:
    config, weights = small_model()
    rotated = RotatedWeights(weights, config)

    plain = measure_moments(config, weights, Folding(), TEXTS, no_progress(""))
    other = measure_moments(config, rotated, rotated.folding, TEXTS, no_progress(""))

    for ours, theirs in zip((*plain.values, *plain.gated), (*other.values, *other.gated), strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-3 * np.abs(ours).max())
    assert plain.values[0].shape == (config.num_kv_heads, config.head_dim, config.head_dim)
    assert plain.gated[0].shape == (config.intermediate_size,)


def run_through(
    run: CalibrationRun, weights: ArrayWeights | RotatedWeights | BalancedWeights, layers: int
) -> NDArray[np.float32]:
    for i in range(layers):
        for name, tensors in layer_linears(i).items():
            run.inputs(name)
            run.advance(name, np.concatenate([weights.tensor(tensor) for tensor in tensors]))
    return run.hidden
