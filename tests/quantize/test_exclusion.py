"""Which linears a pattern names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from packages import TOKENS, no_progress, package_runner, small_model

from qwenonnx.errors import DiskSpaceError, QuantizeError
from qwenonnx.graph.weights import fp32_bytes
from qwenonnx.package.package import Package
from qwenonnx.quantize.exclusion import excluded, fused_linears
from qwenonnx.quantize.fused import fused_bytes, kept_linears
from qwenonnx.quantize.options import QuantizeOptions
from qwenonnx.quantize.quantizer import quantize_package
from qwenonnx.quantize.recipes import RECIPES, FusedRecipe

CONFIG, _ = small_model()
UNTIED, _ = small_model(tie_word_embeddings=False)
INT8 = RECIPES["int8"]


def quantize_without(source: Package, target: Path, *patterns: str, recipe: str = "int8") -> Package:
    texts = []
    if recipe == "int4":
        texts.append(target.with_name("calibration.txt"))
        texts[0].write_text("The river rises in the mountains and reaches the sea. " * 8, encoding="utf-8")
    options = QuantizeOptions(exclude=patterns, calibration=tuple(texts), gate=False)
    return quantize_package(source, target, recipe, stage=no_progress, options=options)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("model.layers.0.mlp.down_proj",), ["model.layers.0.mlp.down_proj"]),
        (("model.layers.0.mlp.down_proj.weight",), ["model.layers.0.mlp.down_proj"]),
        (("*.down_proj",), ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]),
        (("model.layers.1.*.qkv_proj",), ["model.layers.1.self_attn.qkv_proj"]),
        (("*.1.self_attn.[qk]_proj",), ["model.layers.1.self_attn.qkv_proj"]),
        (("*.0.*.o_proj", "*.0.*.o_proj"), ["model.layers.0.self_attn.o_proj"]),
        (("lm_head",), ["model.embed_tokens"]),
        (("model.embed_tokens",), ["model.embed_tokens"]),
    ],
    ids=str,
)
def test_patterns_match_the_names_of_graph_and_checkpoint(patterns: tuple[str, ...], expected: list[str]) -> None:
    assert [linear.name for linear in kept_linears(CONFIG, patterns)] == expected


def test_an_untied_head_has_a_name_of_its_own() -> None:
    assert [linear.name for linear in kept_linears(UNTIED, ["lm_head"])] == ["lm_head"]
    assert [linear.name for linear in kept_linears(UNTIED, ["model.embed_tokens"])] == ["model.embed_tokens"]


@pytest.mark.parametrize("pattern", ["down_proj", "*.DOWN_PROJ", "model.norm", "*.input_layernorm", ""])
def test_a_pattern_that_matches_nothing_is_refused_with_some_real_names(pattern: str) -> None:
    with pytest.raises(QuantizeError, match=r"no linear has such a name") as error:
        kept_linears(CONFIG, ["*.o_proj", pattern])

    assert str(error.value).startswith(f"--exclude {pattern}: ")
    assert "model.embed_tokens" in str(error.value)
    assert "model.layers.1.mlp.down_proj" in str(error.value)


def test_the_linears_are_all_of_the_weights_but_norms_and_biases() -> None:
    for config in (CONFIG, UNTIED):
        small = config.num_layers * (2 * config.hidden_size + config.q_size + 2 * config.kv_size) + config.hidden_size
        assert 4 * (sum(linear.weights for linear in fused_linears(config)) + small) == fp32_bytes(config)


def test_excluded_linears_count_as_fp32_in_the_size() -> None:
    assert isinstance(INT8, FusedRecipe)
    everything = excluded(fused_linears(CONFIG), ["*"])
    down = kept_linears(CONFIG, ["*.down_proj"])

    sizes = [fused_bytes(CONFIG, INT8, kept) for kept in ((), down, everything)]

    assert sizes[0] < 0.26 * fp32_bytes(CONFIG)
    weights = sum(linear.weights for linear in down)
    assert sizes[1] - sizes[0] == pytest.approx(weights * (4 - 8.1 / 8), abs=2)
    assert 0.98 * fp32_bytes(CONFIG) < sizes[2] <= fp32_bytes(CONFIG)


def test_too_small_a_disk_for_fp32_linears_is_found(
    tiny_fp32: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def require_space(folder: Path, needed: int) -> None:
        asked.append(needed)
        raise DiskSpaceError("full")

    monkeypatch.setattr("qwenonnx.quantize.quantizer.require_space", require_space)
    for patterns in ((), ("*.down_proj",)):
        with pytest.raises(DiskSpaceError):
            quantize_without(tiny_fp32, tmp_path / "out", *patterns)
    assert asked[1] > asked[0]


@pytest.mark.parametrize("recipe", ["int8", "int8-block", "int4"])
def test_excluding_everything_computes_what_fp32_does(recipe: str, tiny_fp32: Package, tmp_path: Path) -> None:
    result = quantize_without(tiny_fp32, tmp_path / "out", "*", recipe=recipe)

    logits = package_runner(result).score(TOKENS, 0)
    assert np.abs(logits - package_runner(tiny_fp32).score(TOKENS, 0)).max() < 1e-3


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_an_excluded_linear_makes_a_package_nearer_and_larger(recipe: str, tiny_fp32: Package, tmp_path: Path) -> None:
    whole = quantize_without(tiny_fp32, tmp_path / "whole", recipe=recipe)
    part = quantize_without(tiny_fp32, tmp_path / "part", "*.down_proj", "*.gate_proj", recipe=recipe)

    assert part.manifest.details["gate"]["kl_mean"] < whole.manifest.details["gate"]["kl_mean"]
    assert part.bytes > whole.bytes
    assert part.manifest.details["quantization"]["exclude"] == ["*.down_proj", "*.gate_proj"]
    assert "exclude" not in whole.manifest.details["quantization"]


def test_nothing_is_written_for_a_pattern_that_matches_nothing(tiny_fp32: Package, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="no linear has such a name"):
        quantize_without(tiny_fp32, tmp_path / "out", "*.q")
    assert not list(tmp_path.iterdir())


def test_excluding_does_not_change_the_recipe_of_the_table(tiny_fp32: Package, tmp_path: Path) -> None:
    before = replace(INT8)

    quantize_without(tiny_fp32, tmp_path / "out", "lm_head")

    assert RECIPES["int8"] == before
