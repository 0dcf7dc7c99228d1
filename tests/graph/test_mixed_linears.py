"""Graphs of which some linears stay in fp32: the same function, rotated or not, and the right operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from packages import TOKENS, ArrayWeights, graph_runner, small_model, write_graph

from qwenonnx.config import ModelConfig
from qwenonnx.graph.blocks import BlockFormat, BlockLinears
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.int8 import Int8Linears
from qwenonnx.graph.linear import FloatLinears, LinearStyle
from qwenonnx.graph.mixed import MixedLinears
from qwenonnx.graph.weights import Weights
from qwenonnx.quantize.block_quantizers import NearestBlocks
from qwenonnx.quantize.exclusion import fused_linears
from qwenonnx.quantize.rotated_weights import RotatedWeights

Quantized = Callable[[Folding], LinearStyle]
STYLES: dict[str, Quantized] = {
    "int8": Int8Linears,
    "blocks": lambda folding: BlockLinears(NearestBlocks(BlockFormat(8, 32), BlockFormat(8, 32)), folding),
}
LAST = "model.layers.1"


def logits(
    folder: Path, config: ModelConfig, weights: Weights, style: LinearStyle | None = None
) -> NDArray[np.float32]:
    return graph_runner(write_graph(folder, config, weights, style), config).score(TOKENS, 0)


def mixed(
    folder: Path, config: ModelConfig, weights: ArrayWeights, kept: set[str], style: Quantized, rotate: bool = True
) -> NDArray[np.float32]:
    """Logits of a graph that keeps some linears, with rotated weights or not."""
    used: Weights = weights
    folding = Folding()
    if rotate:
        used = RotatedWeights(weights, config)
        folding = used.folding
    return logits(folder, config, used, MixedLinears(style(folding), kept, folding))


def operators(folder: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(str(folder / "model.onnx"), load_external_data=False).graph.node)


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("style", STYLES)
def test_a_graph_that_keeps_everything_computes_what_fp32_does(
    style: str, tied: bool, rotate: bool, tmp_path: Path
) -> None:
    config, weights = small_model(tie_word_embeddings=tied)
    everything = {linear.name for linear in fused_linears(config)}

    result = mixed(tmp_path / "mixed", config, weights, everything, STYLES[style], rotate)

    assert np.abs(result - logits(tmp_path / "fp32", config, weights)).max() < 1e-3
    assert not {"MatMulIntegerToFloat", "QGemm", "MatMulNBits", "QuantizeLinear"} & set(operators(tmp_path / "mixed"))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "kept",
    [
        {f"{LAST}.mlp.gate_proj"},
        {f"{LAST}.mlp.up_proj"},
        {f"{LAST}.mlp.down_proj"},
        {f"{LAST}.mlp.up_proj", f"{LAST}.mlp.down_proj"},
        {f"{LAST}.self_attn.qkv_proj", f"{LAST}.self_attn.o_proj"},
        {"model.embed_tokens"},
    ],
    ids=lambda kept: "+".join(sorted(name.rpartition(".")[2] for name in kept)),
)
def test_each_linear_kept_in_fp32_stays_as_near_as_the_quantized_graph(
    kept: set[str], style: str, tmp_path: Path
) -> None:
    config, weights = small_model()
    expected = logits(tmp_path / "fp32", config, weights)
    without = np.abs(mixed(tmp_path / "none", config, weights, set(), STYLES[style]) - expected).mean()

    result = mixed(tmp_path / "mixed", config, weights, kept, STYLES[style])

    # A wrong rotation or a forgotten row scale gives differences near one; rounding gives a hundredth of that.
    error = np.abs(result - expected).mean()
    assert 0 < error < 1.2 * without < 0.2


def test_keeping_nothing_gives_the_quantized_graph(tmp_path: Path) -> None:
    config, weights = small_model()
    rotated = RotatedWeights(weights, config)

    write_graph(tmp_path / "a", config, rotated, Int8Linears(rotated.folding))
    write_graph(
        tmp_path / "b", config, rotated, MixedLinears(Int8Linears(rotated.folding), frozenset(), rotated.folding)
    )

    first, second = (onnx.load(str(tmp_path / name / "model.onnx"), load_external_data=False) for name in "ab")
    assert {node.name for node in first.graph.node} == {node.name for node in second.graph.node}
    assert (tmp_path / "a" / "model.onnx.data").read_bytes() == (tmp_path / "b" / "model.onnx.data").read_bytes()


def test_an_input_read_by_both_styles_is_quantized_once_and_read_as_it_is(tmp_path: Path) -> None:
    config, weights = small_model(num_hidden_layers=1)
    block = "model.layers.0.mlp"

    mixed(tmp_path, config, weights, {f"{block}.gate_proj"}, Int8Linears)

    nodes = {node.name: node for node in onnx.load(str(tmp_path / "model.onnx"), load_external_data=False).graph.node}
    assert nodes[f"{block}.gate_proj"].op_type == "MatMul"
    assert nodes[f"{block}.up_proj"].op_type == "MatMulIntegerToFloat"
    assert nodes[f"{block}.gate_proj"].input[0] == "model.layers.0.post_attention_layernorm"
    assert nodes[f"{block}.up_proj"].input[0] == f"{block}.input/int8"


@pytest.mark.parametrize("kept", ["model.embed_tokens", "lm_head"])
def test_an_untied_embedding_and_head_are_kept_one_without_the_other(kept: str, tmp_path: Path) -> None:
    config, weights = small_model(tie_word_embeddings=False)

    result = mixed(tmp_path / "mixed", config, weights, {kept}, Int8Linears)

    stored = onnx.load(str(tmp_path / "mixed" / "model.onnx"), load_external_data=False).graph.initializer
    types = {tensor.name: tensor.data_type for tensor in stored}
    other = "lm_head" if kept == "model.embed_tokens" else "model.embed_tokens"
    assert types[f"{kept}.weight"] == onnx.TensorProto.FLOAT
    assert types[f"{other}.weight"] == onnx.TensorProto.INT8
    assert np.abs(result - logits(tmp_path / "fp32", config, weights)).mean() < 0.2


def test_fp32_linears_follow_a_rotation(tmp_path: Path) -> None:
    config, weights = small_model()
    rotated = RotatedWeights(weights, config)

    result = logits(tmp_path / "rotated", config, rotated, FloatLinears(rotated.folding))

    assert np.abs(result - logits(tmp_path / "fp32", config, weights)).max() < 1e-3
