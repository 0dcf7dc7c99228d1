"""Rounding with one scale per output channel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from packages import graph_runner, no_progress, small_model, write_graph

from qwenonnx.export.reference import reference_logits
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.int8 import SMALLEST_SCALE, Int8Linears, quantize_rows
from qwenonnx.graph.linear import EMBEDDING, HEAD
from qwenonnx.quantize.calibration import CalibrationRun
from qwenonnx.quantize.channel_quantizers import CalibratedChannels, calibrate_channels, round_channels
from qwenonnx.quantize.gptq import inverse_factor
from qwenonnx.quantize.moments import layer_linears
from qwenonnx.quantize.rotated_weights import RotatedWeights

Array = NDArray[np.float32]
TEXTS = [list(np.random.default_rng(seed).integers(0, 300, 60)) for seed in range(4)]


def correlated_inputs(count: int, width: int) -> Array:
    random = np.random.default_rng(1)
    mixing = random.standard_normal((width, width)) / 4
    return (random.standard_normal((count, width)) @ mixing + random.standard_normal((count, width))).astype(np.float32)


def test_feedback_keeps_products_closer_than_the_nearest_values() -> None:
    inputs = correlated_inputs(1000, 256)
    matrix = np.random.default_rng(2).standard_normal((64, 256)).astype(np.float32)

    def error(approximation: Array) -> float:
        return float(np.square(inputs @ (approximation - matrix).T).sum())

    values, scales = quantize_rows(matrix)
    rounded = round_channels(matrix, inverse_factor(inputs.T @ inputs))

    assert error(rounded.dequantized()) < 0.75 * error(values * scales[:, None])
    np.testing.assert_allclose(rounded.scales, scales)
    assert np.abs(rounded.values.astype(np.int16)).max() == 127


def test_large_matrices_are_rounded_in_parts_to_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = correlated_inputs(200, 32)
    factor = inverse_factor(inputs.T @ inputs)
    matrix = np.random.default_rng(2).standard_normal((50, 32)).astype(np.float32)
    whole = round_channels(matrix, factor)

    monkeypatch.setattr("qwenonnx.quantize.channel_quantizers.ROWS_AT_ONCE", 7)
    parts = round_channels(matrix, factor)

    np.testing.assert_array_equal(parts.values, whole.values)
    np.testing.assert_array_equal(parts.scales, whole.scales)


def test_a_row_of_zeros_stays_zero() -> None:
    matrix = np.zeros((2, 32), dtype=np.float32)
    matrix[1, 3] = -2.5
    inputs = correlated_inputs(200, 32)

    rounded = round_channels(matrix, inverse_factor(inputs.T @ inputs))

    assert (rounded.values[0] == 0).all()
    assert rounded.scales[0] == np.float32(SMALLEST_SCALE)
    assert rounded.values[1, 3] == -127


@pytest.mark.parametrize("tied", [True, False])
def test_the_matrix_that_is_the_head_is_calibrated(tied: bool) -> None:
    config, weights = small_model(tie_word_embeddings=tied)
    head, other = (EMBEDDING, None) if tied else (HEAD, EMBEDDING)
    inputs = correlated_inputs(300, config.hidden_size)
    gram = inputs.T @ inputs
    quantizer = CalibratedChannels(config, CalibrationRun(config, weights, Folding(), TEXTS), gram)

    matrix = weights.tensor(head)
    calibrated = quantizer.quantize(head, matrix)

    np.testing.assert_array_equal(calibrated.values, round_channels(matrix, inverse_factor(gram)).values)
    assert (calibrated.values != quantize_rows(matrix)[0]).any()
    if other is not None:
        kept = quantizer.quantize(other, weights.tensor(other))
        np.testing.assert_array_equal(kept.values, quantize_rows(weights.tensor(other))[0])


def test_later_linears_see_what_earlier_ones_became() -> None:
    config, weights = small_model()
    gram = np.eye(config.hidden_size, dtype=np.float32)
    runs = [CalibrationRun(config, weights, Folding(), TEXTS) for _ in range(2)]
    quantizer = CalibratedChannels(config, runs[0], gram)
    linears = layer_linears(0) | layer_linears(1)

    for name, tensors in linears.items():
        matrix = np.concatenate([weights.tensor(tensor) for tensor in tensors])
        if name == "model.layers.0.mlp.gate_proj":  # stays in fp32
            quantizer.keep(name, tensors, weights)
            used = matrix
        else:
            used = quantizer.quantize(name, matrix).dequantized()
        runs[1].inputs(name)
        runs[1].advance(name, used)

    np.testing.assert_array_equal(runs[0].hidden, runs[1].hidden)


def test_a_calibrated_graph_is_closer_and_no_larger(tmp_path: Path) -> None:
    """Channels of very different size, as real models have them; the plain random model has nothing to balance."""
    config, weights = small_model()
    for name, tensor in weights.tensors.items():
        if name.endswith(("v_proj.weight", "v_proj.bias", "up_proj.weight")):
            sizes = np.geomspace(0.1, 10, len(tensor), dtype=np.float32)
            weights.tensors[name] = tensor * (sizes if tensor.ndim == 1 else sizes[:, None])
    rotated = RotatedWeights(weights, config)
    text = [int(token) for token in np.random.default_rng(9).integers(0, 300, 60)]
    expected = reference_logits(config, weights, text)

    nearest = write_graph(tmp_path / "nearest", config, rotated, Int8Linears(rotated.folding))
    balanced, quantizer = calibrate_channels(config, rotated, rotated.folding, TEXTS, no_progress(""))
    path = write_graph(tmp_path / "calibrated", config, balanced, Int8Linears(rotated.folding, quantizer))

    graphs = [onnx.load(str(model), load_external_data=False).graph for model in (nearest, path)]
    assert graphs[0].node == graphs[1].node
    lengths = {model.with_name("model.onnx.data").stat().st_size for model in (nearest, path)}
    assert len(lengths) == 1
    errors = [
        float(np.square(graph_runner(model, config).score(text, 0) - expected).mean()) for model in (nearest, path)
    ]
    assert errors[1] < 0.8 * errors[0]
