"""The order of the recipes: what takes more room is nearer to fp32, on every text."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwenonnx.evaluate.fidelity import FidelityReport, measure_candidates
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import load_runner, session_config
from qwenonnx.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

RECIPES = ("int8-block", "int8", "int4")
"""From the most faithful one on."""
TOKENS = 96
"""Of each text: 21 texts are about 2,000 positions."""


@pytest.fixture(scope="module")
def reports(model_checkpoint: Path) -> dict[str, FidelityReport]:
    """All recipes against fp32, in one run."""
    model = model_checkpoint.parents[1]
    session = session_config()
    reference = Package.open(model / "fp32")
    return measure_candidates(
        load_runner(reference, session, context_length=TOKENS),
        {recipe: load_runner(Package.open(model / recipe), session, context_length=TOKENS) for recipe in RECIPES},
        Tokenizer.load(reference.folder),
        bundled_texts(),
        max_tokens=TOKENS,
    )


@pytest.mark.parametrize("name", [text.name for text in bundled_texts()])
def test_the_order_holds_on_every_text(name: str, reports: dict[str, FidelityReport]) -> None:
    means = [text.comparison.kl_mean for recipe in RECIPES for text in reports[recipe].texts if text.name == name]
    assert len(means) == len(RECIPES)
    assert [0.0, *means] == sorted([0.0, *means])


def test_the_order_holds_overall(reports: dict[str, FidelityReport]) -> None:
    overall = [reports[recipe].overall for recipe in RECIPES]
    assert [figures.kl_mean for figures in overall] == sorted(figures.kl_mean for figures in overall)
    agreement = [figures.top1_agreement for figures in overall]
    assert agreement == sorted(agreement, reverse=True)
