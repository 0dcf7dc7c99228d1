"""What can be asked for beside a recipe, and whether it fits recipe and package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from qwenonnx.errors import QuantizeError
from qwenonnx.graph.blocks import BlockFormat
from qwenonnx.package.package import Package
from qwenonnx.quantize.recipes import RECIPES, FusedRecipe, PortableRecipe


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Choices that change a recipe.

    `block_size` replaces the recipe's own, `calibration` the bundled texts; linears whose names match one of `exclude`
    stay in fp32. `per_channel` and `reduce_range` are for the recipes of portable graphs (None: the recipe's own).
    `gate` off writes the package however far it is from its source.
    """

    block_size: int | None = None
    calibration: tuple[Path, ...] = ()
    exclude: tuple[str, ...] = ()
    per_channel: bool | None = None
    reduce_range: bool | None = None
    gate: bool = True


def choose_recipe(name: str, options: QuantizeOptions, source: Package) -> FusedRecipe | PortableRecipe:
    """The recipe of that name, changed as the options say.

    Raises:
        QuantizeError: there is none, it is not for the package's kind of graph, or an option is not for it.
    """
    recipe = RECIPES.get(name)
    if recipe is None:
        raise QuantizeError(f"there is no recipe {name!r}; choose one of: {', '.join(RECIPES)}.")
    _check_graph(recipe, source)
    if options.calibration and not recipe.calibrate:
        raise QuantizeError(f"the recipe {name} uses no calibration texts; leave --calibration out.")
    if isinstance(recipe, PortableRecipe):
        if options.block_size is not None:
            raise QuantizeError(f"the recipe {name} has no blocks; leave --block-size out.")
        return replace(
            recipe,
            per_channel=recipe.per_channel if options.per_channel is None else options.per_channel,
            reduce_range=recipe.reduce_range if options.reduce_range is None else options.reduce_range,
        )
    for option, value in (("--per-channel", options.per_channel), ("--reduce-range", options.reduce_range)):
        if value is not None:
            raise QuantizeError(f"the recipe {name} knows no {option}; leave it out.")
    return recipe if options.block_size is None else _with_blocks(recipe, options.block_size, source)


def _check_graph(recipe: FusedRecipe | PortableRecipe, source: Package) -> None:
    graph = source.manifest.graph
    if graph in recipe.graphs:
        return
    fitting = ", ".join(other.name for other in RECIPES.values() if graph in other.graphs)
    if isinstance(recipe, FusedRecipe):
        raise QuantizeError(
            f"{source.folder}: the recipe {recipe.name} needs the fused graph, and this one is {graph}; export the "
            f"checkpoint with `qwenonnx export` to get the fused graph, or choose one of: {fitting}."
        )
    raise QuantizeError(
        f"{source.folder}: the recipe {recipe.name} is for graphs of other exporters, and this one is fused; "
        f"choose one of: {fitting}."
    )


def _with_blocks(recipe: FusedRecipe, size: int, source: Package) -> FusedRecipe:
    if recipe.linears is None:
        raise QuantizeError(f"the recipe {recipe.name} has no blocks; leave --block-size out.")
    widths = (source.config.hidden_size, source.config.q_size, source.config.intermediate_size)
    if size < 16 or size & (size - 1) or any(width % size for width in widths):
        raise QuantizeError(
            f"a block size of {size} is not possible: it must be a power of two from 16 on that divides "
            f"{', '.join(str(width) for width in sorted(set(widths)))}."
        )
    return replace(recipe, linears=BlockFormat(recipe.linears.bits, size), special={})
