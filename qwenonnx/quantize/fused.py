"""Writing the fused graph with quantized linears."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from qwenonnx.config import ModelConfig
from qwenonnx.files import Progress
from qwenonnx.graph.blocks import BlockLinears, BlockQuantizer
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.decoder import write_decoder
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.int8 import ChannelQuantizer, Int8Linears, NearestChannels
from qwenonnx.graph.linear import LinearStyle
from qwenonnx.graph.mixed import MixedLinears
from qwenonnx.graph.stored_weights import StoredWeights
from qwenonnx.graph.weights import WatchedWeights, Weights, fp32_bytes
from qwenonnx.package.manifest import DATA_NAME, MODEL_NAME
from qwenonnx.package.package import Package
from qwenonnx.quantize.block_quantizers import CalibratedBlocks, NearestBlocks
from qwenonnx.quantize.calibration import CalibrationRun
from qwenonnx.quantize.calibration_texts import calibration_ids
from qwenonnx.quantize.channel_quantizers import calibrate_channels
from qwenonnx.quantize.exclusion import Linear, excluded, fused_linears
from qwenonnx.quantize.recipes import FusedRecipe
from qwenonnx.quantize.rotated_weights import RotatedWeights


def kept_linears(config: ModelConfig, patterns: Iterable[str]) -> list[Linear]:
    """The linears that stay in fp32.

    Raises:
        QuantizeError: a pattern matches none.
    """
    return excluded(fused_linears(config), patterns)


def fused_bytes(config: ModelConfig, recipe: FusedRecipe, kept: Sequence[Linear]) -> int:
    """Upper bound of the bytes of a quantized graph's weights."""
    fp32 = 4 * sum(linear.weights for linear in kept)
    return fp32 + int((fp32_bytes(config) - fp32) * recipe.bits_per_weight / 32)


def write_fused(
    source: Package,
    folder: Path,
    recipe: FusedRecipe,
    kept: Sequence[Linear],
    texts: Sequence[Path],
    stage: Callable[[str], Progress],
) -> None:
    """Writes graph and data into `folder`; `texts` replace the bundled calibration texts, if there are any.

    Raises:
        QuantizeError: the calibration texts are too short.
        PackageError: the source's graph lacks a tensor.
    """
    config = source.config
    weights, style = _prepare(source, recipe, {linear.name for linear in kept}, texts, stage)
    watched = WatchedWeights(weights, config, stage("quantizing"))
    with GraphBuilder(folder / MODEL_NAME, folder / DATA_NAME) as g:
        write_decoder(g, config, watched, style)
        g.save("qwen2", {"recipe": recipe.name})


def _prepare(
    source: Package,
    recipe: FusedRecipe,
    kept: AbstractSet[str],
    texts: Sequence[Path],
    stage: Callable[[str], Progress],
) -> tuple[Weights, LinearStyle]:
    config = source.config
    weights: Weights = StoredWeights(source.model_path, config)
    folding = Folding()
    if recipe.rotate:
        rotated = RotatedWeights(weights, config)
        weights, folding = rotated, rotated.folding
    ids = calibration_ids(source, texts) if recipe.calibrate else []
    style: LinearStyle
    if recipe.linears is None or recipe.embedding is None:
        quantizer: ChannelQuantizer = NearestChannels()
        if recipe.calibrate:
            weights, quantizer = calibrate_channels(config, weights, folding, ids, stage("calibrating"))
        style = Int8Linears(folding, quantizer)
    else:
        nearest = NearestBlocks(recipe.linears, recipe.embedding, recipe.special)
        blocks: BlockQuantizer = nearest
        if recipe.calibrate:
            blocks = CalibratedBlocks(nearest, CalibrationRun(config, weights, folding, ids))
        style = BlockLinears(blocks, folding)
    return weights, MixedLinears(style, kept, folding) if kept else style
