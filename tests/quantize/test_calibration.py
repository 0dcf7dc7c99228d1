"""The calibration run computes the model: with the original weights it gives the reference's inputs and outputs."""

from __future__ import annotations

import numpy as np
import pytest
from packages import ArrayWeights, small_model

from qwenonnx.config import ModelConfig
from qwenonnx.export.reference import reference_logits
from qwenonnx.graph.folding import Folding
from qwenonnx.quantize.calibration import CalibrationRun
from qwenonnx.quantize.rotated_weights import RotatedWeights

TEXTS = [[5, 9, 301, 44, 7, 7, 120], [3, 250, 18]]


def run_through(run: CalibrationRun, weights: ArrayWeights | RotatedWeights, config: ModelConfig) -> None:
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        parts = {f"{layer}.self_attn.qkv_proj": [f"{layer}.self_attn.{kind}_proj" for kind in "qkv"]}
        parts[f"{layer}.self_attn.o_proj"] = [f"{layer}.self_attn.o_proj"]
        parts.update({f"{layer}.mlp.{kind}_proj": [f"{layer}.mlp.{kind}_proj"] for kind in ("gate", "up", "down")})
        for name, tensors in parts.items():
            gram = run.gram(name)
            weight = np.concatenate([weights.tensor(f"{tensor}.weight") for tensor in tensors])
            assert gram.shape == (weight.shape[1], weight.shape[1])
            run.advance(name, weight)


@pytest.mark.parametrize("rotate", [False, True])
def test_the_hidden_states_are_the_models(rotate: bool) -> None:
    config, weights = small_model()
    used: ArrayWeights | RotatedWeights = RotatedWeights(weights, config) if rotate else weights
    folding = used.folding if isinstance(used, RotatedWeights) else Folding()
    run = CalibrationRun(config, used, folding, TEXTS)

    run_through(run, used, config)

    hidden = run.hidden
    normed = hidden / np.sqrt(np.square(hidden).mean(-1, keepdims=True) + config.rms_norm_eps)
    normed = (
        normed @ folding.head_transform
        if folding.head_transform is not None
        else normed * used.tensor("model.norm.weight")
    )
    logits = normed @ used.tensor("model.embed_tokens.weight").T
    expected = np.concatenate([reference_logits(config, weights, text) for text in TEXTS])
    np.testing.assert_allclose(logits, expected, atol=1e-3)


def test_the_gram_matrix_of_up_is_that_of_gate() -> None:
    config, weights = small_model()
    run = CalibrationRun(config, weights, Folding(), TEXTS)
    for kind in ("qkv", "o"):
        name = f"model.layers.0.self_attn.{kind}_proj"
        width = run.gram(name).shape[0]
        run.advance(
            name,
            np.zeros((config.q_size + 2 * config.kv_size if kind == "qkv" else config.hidden_size, width), np.float32),
        )

    gate = run.gram("model.layers.0.mlp.gate_proj")
    run.advance("model.layers.0.mlp.gate_proj", weights.tensor("model.layers.0.mlp.gate_proj.weight"))

    assert run.gram("model.layers.0.mlp.up_proj") is gate
