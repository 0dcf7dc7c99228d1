"""What is said about a package whose recipe costs it much, beside the gate's yes or no."""

from __future__ import annotations

from collections.abc import Sequence

from qwenonnx.evaluate.gate import GateResult
from qwenonnx.quantize.recipes import FusedRecipe, PortableRecipe

# Measured on Qwen2.5-Coder-0.5B-Instruct, as are the figures of the alternative.
OUTLIERS = "with --exclude '*.down_proj', whose inputs have the largest outliers, it costs a tenth; "
ALTERNATIVE = (
    "the package that `qwenonnx export` makes, quantized with --recipe int8, keeps 97 % of the likeliest tokens at a "
    "mean KL of 0.002 (measured on Qwen2.5-Coder-0.5B-Instruct)"
)


def advice(recipe: FusedRecipe | PortableRecipe) -> str:
    """What to use instead, to be put behind a refusal."""
    return f" ({ALTERNATIVE})" if isinstance(recipe, PortableRecipe) else ""


def cost(recipe: FusedRecipe | PortableRecipe, gate: GateResult, exclude: Sequence[str] = ()) -> str | None:
    """What a package that passed costs, and what to use instead; None where it is as faithful as it should be."""
    measured = gate.measured
    if not isinstance(recipe, PortableRecipe) or measured is None:
        return None
    within = measured.kl_mean <= recipe.warning.kl_mean and measured.top1_agreement >= recipe.warning.top1_agreement
    if within:
        return None
    remedy = ALTERNATIVE if exclude else OUTLIERS + ALTERNATIVE
    return (
        f"the recipe {recipe.name} costs this model much: the likeliest token is another one at "
        f"{1 - measured.top1_agreement:.0%} of the positions, mean KL {measured.kl_mean:.3f}, perplexity "
        f"{measured.perplexity:.2f} against {measured.reference_perplexity:.2f}; {remedy}."
    )
