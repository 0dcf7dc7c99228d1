"""From an fp32 package to a quantized one: choose, write, judge, put in place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from qwenonnx.errors import QuantizeError
from qwenonnx.evaluate.gate import GATE_TOKENS, GateResult, run_gate
from qwenonnx.evaluate.texts import bundled_texts
from qwenonnx.files import Progress, require_space, staged_folder
from qwenonnx.package.manifest import DATA_NAME, MODEL_NAME
from qwenonnx.package.package import Package
from qwenonnx.package.writer import ADOPTED, check_target, finish_package, tool_versions
from qwenonnx.quantize.exclusion import excluded
from qwenonnx.quantize.fused import fused_bytes, kept_linears, write_fused
from qwenonnx.quantize.options import QuantizeOptions, choose_recipe
from qwenonnx.quantize.portable import portable_bytes, write_portable
from qwenonnx.quantize.portable_linears import PortableGraph
from qwenonnx.quantize.recipes import FusedRecipe, PortableRecipe
from qwenonnx.quantize.verdict import advice, cost
from qwenonnx.runtime.load import load_runner
from qwenonnx.runtime.session import SessionConfig
from qwenonnx.text.tokenizer import Tokenizer

SPARE_BYTES = 64 << 20


def quantize_package(
    source: Package,
    target: Path,
    recipe_name: str,
    *,
    stage: Callable[[str], Progress],
    options: QuantizeOptions | None = None,
) -> Package:
    """Writes a quantized copy of `source` to `target`; `source` is only read, and `target` replaced at the end.

    A package that fails the gate is kept beside `target` under a name that ends in `.refused`. One that passes, but is
    much worse than its source, has a `warning` in the gate's entry of its manifest.

    Raises:
        QuantizeError: the recipe or an option is impossible, the source is quantized already, source and target are
            one, or the result fails the gate.
        PackageError: the source is damaged, or `target` holds something else than a package.
        DiskSpaceError: the result does not fit.
    """
    options = options or QuantizeOptions()
    _check_source(source, target)
    recipe = choose_recipe(recipe_name, options, source)
    _check_target(target)
    if isinstance(recipe, FusedRecipe):
        graph = None
        kept = kept_linears(source.config, options.exclude)
        needed = fused_bytes(source.config, recipe, kept)
    else:
        graph = PortableGraph.read(source.model_path)
        kept = excluded(graph.linears, options.exclude)
        needed = portable_bytes(source, graph, recipe, kept)
    require_space(target, needed + SPARE_BYTES)
    source.check_sums(stage("checking the input"))
    with staged_folder(target) as folder:
        _copy_texts(source, folder)
        if isinstance(recipe, FusedRecipe):
            write_fused(source, folder, recipe, kept, options.calibration, stage)
        elif graph is not None:
            write_portable(source, folder, graph, recipe, kept, options.calibration, stage)
        written = _described(source, folder, recipe, options)
        gate = _judge(source, written, recipe, stage("comparing with the input"))
        stage("summing the files")
        verdict = gate.to_json()
        if warning := cost(recipe, gate, options.exclude):
            verdict["warning"] = warning
        manifest = written.manifest
        finish_package(folder, replace(manifest, details={**manifest.details, "gate": verdict}))
        if not gate.passed and options.gate:
            aside = refused_folder(target)
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            raise QuantizeError(
                f"{target}: the package was refused because {gate.failure}; it is kept in {aside}, and --no-gate "
                f"writes it all the same{advice(recipe)}."
            )
    return Package.open(target)


def refused_folder(target: Path) -> Path:
    """Where a package goes that was meant for `target` and failed the gate."""
    return target.with_name(f"{target.name}.refused")


def _check_source(source: Package, target: Path) -> None:
    if source.manifest.recipe != "fp32":
        raise QuantizeError(
            f"{source.folder}: already quantized (recipe {source.manifest.recipe}); "
            "quantize the fp32 package that it was made from."
        )
    if target.resolve() == source.folder.resolve():
        raise QuantizeError(f"{target}: input and output are the same folder; choose another one with -o.")


def _check_target(target: Path) -> None:
    check_target(target)
    check_target(refused_folder(target))


def _copy_texts(source: Package, folder: Path) -> None:
    """Copies the files of a package that are neither graph nor weights."""
    manifest = source.manifest
    for name in manifest.files:
        if name not in (manifest.model_file, *manifest.data_files):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.folder / name, folder / name)


def _described(
    source: Package, folder: Path, recipe: FusedRecipe | PortableRecipe, options: QuantizeOptions
) -> Package:
    """The package that is being written into `folder`, its files not summed and its gate not passed yet."""
    details = {key: value for key, value in source.manifest.details.items() if key != ADOPTED}
    manifest = replace(
        source.manifest,
        recipe=recipe.name,
        versions={**source.manifest.versions, **tool_versions()},
        details={**details, "quantization": _choices(recipe, options.exclude)},
        model_file=MODEL_NAME,
        data_files=(DATA_NAME,) if (folder / DATA_NAME).is_file() else (),
    )
    return replace(source, folder=folder, manifest=manifest)


def _judge(source: Package, written: Package, recipe: FusedRecipe | PortableRecipe, progress: Progress) -> GateResult:
    context = min(GATE_TOKENS, source.config.context_length)
    reference = load_runner(source, SessionConfig.for_one_run(), context_length=context)
    candidate = load_runner(written, SessionConfig.for_this_machine(), context_length=context)
    return run_gate(reference, candidate, Tokenizer.load(written.folder), bundled_texts(), recipe.limits, progress)


def _choices(recipe: FusedRecipe | PortableRecipe, exclude: Sequence[str]) -> dict[str, Any]:
    chosen = {name: value for name, value in asdict(recipe).items() if name not in ("name", "limits", "warning")}
    if exclude:
        chosen["exclude"] = list(exclude)
    return {name: value for name, value in chosen.items() if value is not None}
