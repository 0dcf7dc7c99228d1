"""`qwenonnx quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwenonnx.cli.console import Stages, say
from qwenonnx.cli.options import PackageFolder, Quiet


def quantize(
    package: PackageFolder,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="The new package (default: beside DIR, named by the recipe).",
        ),
    ] = None,
    recipe: Annotated[str, typer.Option("--recipe", help="How to quantize: int8.")] = "int8",
    quiet: Quiet = False,
) -> None:
    """Write a quantized copy of an fp32 package."""
    from qwenonnx.package.package import Package
    from qwenonnx.quantize.quantizer import quantize_package

    source = Package.open(package)
    target = output or package.absolute().parent / recipe
    with Stages(quiet=quiet) as stages:
        result = quantize_package(source, target, recipe, stage=stages.begin)
    if not quiet:
        say(f"{source.bytes / 1e6:,.0f} MB became {result.bytes / 1e6:,.0f} MB")
    print(target)
