"""Second moments of a model's activations on calibration texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.files import Progress
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.linear import joined
from qwenonnx.graph.weights import Weights
from qwenonnx.quantize.calibration import CalibrationRun
from qwenonnx.quantize.rotation import rotate_blocks

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over all tokens, one entry a layer for the first two.

    `values` `[kv_heads, head_dim, head_dim]`: of the outer products of the attention's outputs, over the heads that
    share keys and values. `gated` `[intermediate]`: of the squares of down_proj's inputs, before a rotation. `head`
    `[hidden, hidden]`: of the outer products of the head's inputs.
    """

    values: tuple[Array, ...]
    gated: tuple[Array, ...]
    head: Array


def measure_moments(
    config: ModelConfig, weights: Weights, folding: Folding, texts: Sequence[Sequence[int]], progress: Progress
) -> Moments:
    """Runs the texts through the model as it is."""
    run = CalibrationRun(config, weights, folding, texts)
    values, gated = [], []
    for i in range(config.num_layers):
        for name, tensors in layer_linears(i).items():
            inputs = run.inputs(name)
            if name.endswith("o_proj"):
                heads = inputs.reshape(len(inputs), config.num_kv_heads, -1, config.head_dim)
                groups = heads.transpose(1, 0, 2, 3).reshape(config.num_kv_heads, -1, config.head_dim)
                values.append(groups.transpose(0, 2, 1) @ groups)
            elif name.endswith("down_proj"):
                if folding.down_rotation is not None:
                    inputs = rotate_blocks(inputs, folding.down_rotation.T)
                gated.append(np.asarray(np.square(inputs).sum(axis=0)))
            run.advance(name, joined(weights, tensors))
        progress(i + 1, config.num_layers)
    inputs = run.head_inputs()
    return Moments(tuple(values), tuple(gated), inputs.T @ inputs)


def layer_linears(layer: int) -> dict[str, list[str]]:
    """The linears of a layer in the order of the graph, and the tensors that each is made of."""
    attention, block = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    linears = {f"{attention}.qkv_proj": [f"{attention}.{kind}_proj.weight" for kind in "qkv"]}
    for name in (f"{attention}.o_proj", *(f"{block}.{kind}_proj" for kind in ("gate", "up", "down"))):
        linears[name] = [f"{name}.weight"]
    return linears
