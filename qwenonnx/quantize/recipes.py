"""The recipes: how a package's linears are stored, and how far the result may be from its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from qwenonnx.evaluate.gate import GateLimits
from qwenonnx.graph.blocks import BlockFormat


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to quantize packages with one of the `graphs`. Packages past `limits` are refused."""

    graphs: ClassVar[tuple[str, ...]] = ()

    name: str
    description: str
    limits: GateLimits


@dataclass(frozen=True, slots=True)
class FusedRecipe(Recipe):
    """Writes the fused graph anew.

    `linears` None stands for 8-bit weights and activations with a scale per output channel and per token
    (`graph.int8`); a block format for `MatMulNBits`, with `special` ones for some kinds of linears. `embedding` is the
    format of the matrix that is embedding and head. `rotate` folds a rotation into the weights, and `calibrate` rounds
    with GPTQ on calibration texts.
    """

    graphs: ClassVar[tuple[str, ...]] = ("fused",)

    linears: BlockFormat | None
    embedding: BlockFormat | None
    special: Mapping[str, BlockFormat]
    rotate: bool
    calibrate: bool

    @property
    def bits_per_weight(self) -> float:
        """Upper bound of the bits that a weight takes, scales included."""
        return max(_bits(self.linears), _bits(self.embedding))


@dataclass(frozen=True, slots=True)
class PortableRecipe(Recipe):
    """Changes a graph that another program wrote, with onnxruntime's own quantizer: products with stored weights only.

    Activations have one scale for all tokens, which `calibrate` fixes beforehand on calibration texts. Weights have one
    scale a matrix, or one per output channel (`per_channel`); `reduce_range` leaves them 7 bits, for processors whose
    8-bit products saturate. A package past `warning` is written, but with a warning: what it costs is much.
    """

    graphs: ClassVar[tuple[str, ...]] = ("portable", "genai")

    per_channel: bool
    reduce_range: bool
    calibrate: bool
    warning: GateLimits


def _bits(storage: BlockFormat | None) -> float:
    return 8.1 if storage is None else storage.bits + 32 / storage.block_size


# The widely copied recipe, `dynamic` with one scale a matrix, multiplies the perplexity of a 0.5B model by 1.5, at a KL
# of 0.48; people use it and shall see what it costs. A model of which nothing is left has a KL of several nats.
HARMED = GateLimits(kl_mean=0.02, top1_agreement=0.90)
BROKEN = GateLimits(kl_mean=2.0, top1_agreement=0.25)

RECIPES: Mapping[str, FusedRecipe | PortableRecipe] = {
    recipe.name: recipe
    for recipe in (
        FusedRecipe(
            name="int8",
            description="8-bit weights per channel, 8-bit activations per token: the fastest for prompts and batches",
            linears=None,
            embedding=None,
            special={},
            rotate=True,
            calibrate=True,
            limits=GateLimits(kl_mean=0.006, top1_agreement=0.93),
        ),
        FusedRecipe(
            name="int8-block",
            description="8-bit weights in blocks of 32: the most faithful, 10 % larger, slower for prompts",
            linears=BlockFormat(8, 32),
            embedding=BlockFormat(8, 32),
            special={},
            rotate=True,
            calibrate=False,
            limits=GateLimits(kl_mean=0.003, top1_agreement=0.95),
        ),
        FusedRecipe(
            name="int4",
            description="4-bit weights in blocks of 32 and 64, 8-bit embedding and head, calibrated: the smallest",
            linears=BlockFormat(4, 32),
            embedding=BlockFormat(8, 128),
            # Where larger blocks harm least for the bytes that they save.
            special={"gate_proj": BlockFormat(4, 64)},
            rotate=True,
            calibrate=True,
            limits=GateLimits(kl_mean=0.12, top1_agreement=0.80),
        ),
        PortableRecipe(
            name="dynamic",
            description="onnxruntime's quantize_dynamic, for graphs of other exporters: what is most widely used",
            per_channel=True,
            reduce_range=False,
            calibrate=False,
            limits=BROKEN,
            warning=HARMED,
        ),
        PortableRecipe(
            name="static",
            description="onnxruntime's quantize_static, for graphs of other exporters: activations scaled beforehand",
            per_channel=True,
            reduce_range=False,
            calibrate=True,
            limits=BROKEN,
            warning=HARMED,
        ),
    )
}
