"""Which format a matrix gets."""

from __future__ import annotations

import numpy as np
import pytest
from packages import quantize

from qwenonnx.graph.blocks import BlockFormat
from qwenonnx.package.package import Package
from qwenonnx.quantize.block_quantizers import NearestBlocks
from qwenonnx.quantize.recipes import RECIPES, FusedRecipe

NEAREST = NearestBlocks(BlockFormat(4, 32), BlockFormat(8, 128), {"gate_proj": BlockFormat(4, 64)})
FUSED = [recipe for recipe in RECIPES.values() if isinstance(recipe, FusedRecipe)]


@pytest.mark.parametrize(
    ("name", "width", "expected"),
    [
        ("model.layers.0.mlp.up_proj", 896, BlockFormat(4, 32)),
        ("model.layers.0.mlp.gate_proj", 896, BlockFormat(4, 64)),
        ("model.embed_tokens.weight", 896, BlockFormat(8, 128)),
        ("lm_head.weight", 896, BlockFormat(8, 128)),
        ("model.embed_tokens.weight", 64, BlockFormat(8, 64)),
        ("model.layers.0.mlp.down_proj", 48, BlockFormat(4, 16)),
    ],
)
def test_embedding_and_special_linears_have_formats_of_their_own(name: str, width: int, expected: BlockFormat) -> None:
    assert NEAREST.storage(name, width) == expected
    assert NEAREST.quantize(name, np.ones((2, width), dtype=np.float32)).format == expected


@pytest.mark.parametrize("recipe", FUSED, ids=lambda recipe: recipe.name)
def test_the_manifest_says_what_was_chosen(
    recipe: FusedRecipe, tiny_fp32: Package, tmp_path_factory: pytest.TempPathFactory
) -> None:
    package = quantize(tiny_fp32, tmp_path_factory.mktemp(recipe.name) / "out", recipe.name)

    chosen = package.manifest.details["quantization"]
    assert chosen["rotate"] is recipe.rotate
    assert chosen["calibrate"] is recipe.calibrate
    if recipe.linears is not None:
        assert chosen["linears"]["bits"] == (4 if recipe.name == "int4" else 8)
    assert package.manifest.details["gate"]["passed"] is True
