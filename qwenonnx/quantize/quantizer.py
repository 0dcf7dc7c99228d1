"""From an fp32 package to a quantized one: fold, write, judge, put in place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qwenonnx.errors import QuantizeError
from qwenonnx.evaluate.gate import GATE_TOKENS, GateLimits, GateResult, run_gate
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.files import Progress, require_space, staged_folder
from qwenonnx.graph.blocks import BlockFormat, BlockLinears
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.decoder import write_decoder
from qwenonnx.graph.folding import Folding
from qwenonnx.graph.int8 import Int8Linears
from qwenonnx.graph.linear import LinearStyle
from qwenonnx.graph.stored_weights import StoredWeights
from qwenonnx.graph.weights import WatchedWeights, Weights, fp32_bytes
from qwenonnx.package.manifest import DATA_NAME, MODEL_NAME
from qwenonnx.package.package import Package
from qwenonnx.package.writer import TEXT_FILES, check_target, finish_package, tool_versions
from qwenonnx.quantize.block_quantizers import CalibratedBlocks, NearestBlocks
from qwenonnx.quantize.calibration import CalibrationRun
from qwenonnx.quantize.calibration_texts import bundled_calibration, read_calibration
from qwenonnx.quantize.recipes import RECIPES, Recipe
from qwenonnx.quantize.rotated_weights import RotatedWeights
from qwenonnx.runtime.fused_runner import FusedRunner
from qwenonnx.runtime.session import SessionConfig
from qwenonnx.text.tokenizer import Tokenizer

Stage = Callable[[str], Progress]
SPARE_BYTES = 64 << 20
CALIBRATION_TOKENS = 512


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What can be asked for beside a recipe.

    `block_size` replaces the recipe's own, `calibration` the bundled texts; `gate` off writes the package however far
    it is from its source.
    """

    block_size: int | None = None
    calibration: tuple[Path, ...] = ()
    gate: bool = True


def quantize_package(
    source: Package, target: Path, recipe_name: str, *, stage: Stage, options: QuantizeOptions | None = None
) -> Package:
    """Writes a quantized copy of `source` to `target`; `source` is only read, and `target` replaced at the end.

    A package that fails the gate is kept beside `target` under a name that ends in `.refused`.

    Raises:
        QuantizeError: the recipe or an option is impossible, the source is quantized already, source and target are
            one, or the result fails the gate.
        PackageError: the source is damaged, or `target` holds something else than a package.
        DiskSpaceError: the result does not fit.
    """
    options = options or QuantizeOptions()
    recipe = _adapted(recipe_name, options, source)
    _check_places(source, target)
    config = source.config
    require_space(target, int(fp32_bytes(config) * recipe.bits_per_weight / 32) + SPARE_BYTES)
    source.check_sums(stage("checking the input"))
    with staged_folder(target) as folder:
        for name in TEXT_FILES:
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, folder / name)
        weights, style = _prepare(source, recipe, options)
        with GraphBuilder(folder / MODEL_NAME, folder / DATA_NAME) as g:
            write_decoder(g, config, WatchedWeights(weights, config, stage("quantizing")), style)
            g.save("qwen2", {"recipe": recipe.name})
        gate = _judge(source, folder, recipe.limits, stage("comparing with the input"))
        stage("summing the files")
        manifest = replace(
            source.manifest,
            recipe=recipe.name,
            versions=tool_versions(),
            details={**source.manifest.details, "quantization": _choices(recipe), "gate": gate.to_json()},
        )
        finish_package(folder, manifest)
        if not gate.passed and options.gate:
            aside = refused_folder(target)
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            raise QuantizeError(
                f"{target}: the package was refused because {gate.failure}; it is kept in {aside}, and --no-gate "
                "writes it all the same."
            )
    return Package.open(target)


def refused_folder(target: Path) -> Path:
    """Where a package goes that was meant for `target` and failed the gate."""
    return target.with_name(f"{target.name}.refused")


def _adapted(name: str, options: QuantizeOptions, source: Package) -> Recipe:
    recipe = RECIPES.get(name)
    if recipe is None:
        raise QuantizeError(f"there is no recipe {name!r}; choose one of: {', '.join(RECIPES)}.")
    if options.calibration and not recipe.calibrate:
        raise QuantizeError(f"the recipe {name} uses no calibration texts; leave --calibration out.")
    size = options.block_size
    if size is not None:
        if recipe.linears is None:
            raise QuantizeError(f"the recipe {name} has no blocks; leave --block-size out.")
        widths = (source.config.hidden_size, source.config.q_size, source.config.intermediate_size)
        if size < 16 or size & (size - 1) or any(width % size for width in widths):
            raise QuantizeError(
                f"a block size of {size} is not possible: it must be a power of two from 16 on that divides "
                f"{', '.join(str(width) for width in sorted(set(widths)))}."
            )
        recipe = replace(recipe, linears=BlockFormat(recipe.linears.bits, size), special={})
    return recipe


def _check_places(source: Package, target: Path) -> None:
    if source.manifest.recipe != "fp32":
        raise QuantizeError(
            f"{source.folder}: already quantized (recipe {source.manifest.recipe}); "
            "quantize the fp32 package that it was made from."
        )
    if target.resolve() == source.folder.resolve():
        raise QuantizeError(f"{target}: input and output are the same folder; choose another one with -o.")
    check_target(target)
    check_target(refused_folder(target))


def _prepare(source: Package, recipe: Recipe, options: QuantizeOptions) -> tuple[Weights, LinearStyle]:
    config = source.config
    weights: Weights = StoredWeights(source.model_path, config)
    folding = Folding()
    if recipe.rotate:
        rotated = RotatedWeights(weights, config)
        weights, folding = rotated, rotated.folding
    if recipe.linears is None or recipe.embedding is None:
        return weights, Int8Linears(folding)
    nearest = NearestBlocks(recipe.linears, recipe.embedding, recipe.special)
    if not recipe.calibrate:
        return weights, BlockLinears(nearest, folding)
    tokenizer = Tokenizer.load(source.folder)
    texts = read_calibration(list(options.calibration)) if options.calibration else bundled_calibration()
    limit = min(CALIBRATION_TOKENS, config.context_length)
    run = CalibrationRun(config, weights, folding, _usable([tokenizer.encode(text)[:limit] for text in texts]))
    return weights, BlockLinears(CalibratedBlocks(nearest, run), folding)


def _usable(texts: Sequence[list[int]]) -> list[list[int]]:
    usable = [text for text in texts if len(text) > 1]
    if not usable:
        raise QuantizeError("the calibration texts hold no two tokens together; give longer ones.")
    return usable


def _judge(source: Package, folder: Path, limits: GateLimits, progress: Progress) -> GateResult:
    context = min(GATE_TOKENS, source.config.context_length)
    runners = [
        FusedRunner(path, source.config, session, context_length=context)
        for path, session in (
            (source.model_path, SessionConfig.for_one_run()),
            (folder / MODEL_NAME, SessionConfig.for_this_machine()),
        )
    ]
    return run_gate(runners[0], runners[1], Tokenizer.load(folder), bundled_texts(), limits, progress)


def _choices(recipe: Recipe) -> dict[str, Any]:
    chosen = {name: value for name, value in asdict(recipe).items() if name not in ("name", "limits")}
    return {name: value for name, value in chosen.items() if value is not None}
