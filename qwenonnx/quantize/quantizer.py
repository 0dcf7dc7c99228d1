"""From an fp32 package to a quantized one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwenonnx.config import ModelConfig
from qwenonnx.errors import QuantizeError
from qwenonnx.files import Progress, require_space, staged_folder
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.decoder import write_decoder
from qwenonnx.graph.int8 import Int8Linears
from qwenonnx.graph.linear import LinearStyle
from qwenonnx.graph.stored_weights import StoredWeights
from qwenonnx.graph.weights import WatchedWeights, Weights, fp32_bytes
from qwenonnx.package.manifest import DATA_NAME, MODEL_NAME
from qwenonnx.package.package import Package
from qwenonnx.package.writer import TEXT_FILES, check_target, finish_package, tool_versions
from qwenonnx.quantize.rotated_weights import RotatedWeights
from qwenonnx.quantize.rotation import down_block

SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to store linears: how big a weight gets, and how to make weights and linears for it."""

    name: str
    bits_per_weight: int
    description: str
    prepare: Callable[[Weights, ModelConfig], tuple[Weights, LinearStyle, Mapping[str, Any]]]


def _prepare_int8(weights: Weights, config: ModelConfig) -> tuple[Weights, LinearStyle, Mapping[str, Any]]:
    rotated = RotatedWeights(weights, config)
    details = {
        "activations": "int8, one scale per token",
        "weights": "int8, one scale per output channel",
        "residual_rotation": "cosine x hadamard, offline",
        "down_proj_rotation_block": down_block(config.intermediate_size),
    }
    return rotated, Int8Linears(rotated.head_transform, rotated.down_rotation), details


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("int8", 8, "8-bit weights and per-token 8-bit activations, residual stream rotated", _prepare_int8),
    )
}


def quantize_package(source: Package, target: Path, recipe_name: str, *, stage: Callable[[str], Progress]) -> Package:
    """Writes a quantized copy of `source` to `target`; `source` is only read, and `target` replaced at the end.

    Raises:
        QuantizeError: the recipe is unknown, the source is quantized already, or source and target are one.
        PackageError: the source is damaged, or `target` holds something else than a package.
        DiskSpaceError: the result does not fit.
    """
    recipe = RECIPES.get(recipe_name)
    if recipe is None:
        raise QuantizeError(f"there is no recipe {recipe_name!r}; choose one of: {', '.join(RECIPES)}.")
    if source.manifest.recipe != "fp32":
        raise QuantizeError(
            f"{source.folder}: already quantized (recipe {source.manifest.recipe}); "
            "quantize the fp32 package that it was made from."
        )
    if target.resolve() == source.folder.resolve():
        raise QuantizeError(f"{target}: input and output are the same folder; choose another one with -o.")
    check_target(target)
    config = source.config
    require_space(target, fp32_bytes(config) * recipe.bits_per_weight // 32 + SPARE_BYTES)
    source.check_sums(stage("checking the input"))
    with staged_folder(target) as folder:
        stored = StoredWeights(source.model_path, config)
        weights, style, details = recipe.prepare(stored, config)
        with GraphBuilder(folder / MODEL_NAME, folder / DATA_NAME) as g:
            write_decoder(g, config, WatchedWeights(weights, config, stage("quantizing")), style)
            g.save("qwen2", {"recipe": recipe.name})
        for name in TEXT_FILES:
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, folder / name)
        stage("summing the files")
        finish_package(
            folder,
            replace(
                source.manifest,
                recipe=recipe.name,
                versions=tool_versions(),
                details={**source.manifest.details, "quantization": dict(details)},
            ),
        )
    return Package.open(target)
