"""The recipes: how linears, embedding and head are stored, and how far the result may be from its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qwenonnx.evaluate.gate import GateLimits
from qwenonnx.graph.blocks import BlockFormat


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to quantize.

    `linears` None stands for 8-bit weights and activations with a scale per output channel and per token
    (`graph.int8`); a block format for `MatMulNBits`, with `special` ones for some kinds of linears. `embedding` is the
    format of the matrix that is embedding and head. `rotate` folds a rotation into the weights, and `calibrate` rounds
    with GPTQ on calibration texts. Packages past `limits` are refused.
    """

    name: str
    description: str
    linears: BlockFormat | None
    embedding: BlockFormat | None
    special: Mapping[str, BlockFormat]
    rotate: bool
    calibrate: bool
    limits: GateLimits

    @property
    def bits_per_weight(self) -> float:
        """Upper bound of the bits that a weight takes, scales included."""
        return max(_bits(self.linears), _bits(self.embedding))


def _bits(storage: BlockFormat | None) -> float:
    return 8.1 if storage is None else storage.bits + 32 / storage.block_size


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="int8",
            description="8-bit weights per channel, 8-bit activations per token: the fastest for prompts and batches",
            linears=None,
            embedding=None,
            special={},
            rotate=True,
            calibrate=False,
            limits=GateLimits(kl_mean=0.006, top1_agreement=0.93),
        ),
        Recipe(
            name="int8-block",
            description="8-bit weights in blocks of 32: the most faithful, 10 % larger, slower for prompts",
            linears=BlockFormat(8, 32),
            embedding=BlockFormat(8, 32),
            special={},
            rotate=True,
            calibrate=False,
            limits=GateLimits(kl_mean=0.003, top1_agreement=0.95),
        ),
        Recipe(
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
    )
}
