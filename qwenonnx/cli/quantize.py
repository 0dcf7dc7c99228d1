"""`qwenonnx quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwenonnx.cli.console import Stages, describe_gate, say
from qwenonnx.cli.options import PackageFolder, Quiet, output_folder
from qwenonnx.cli.packages import announce_replacing, beside, open_package


def quantize(
    package: PackageFolder,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            parser=output_folder,
            help="The new package (default: beside DIR, named by the recipe).",
        ),
    ] = None,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            help="How to quantize: int8, int8-block or int4; graphs of other exporters with dynamic or static.",
        ),
    ] = "int8",
    block_size: Annotated[
        int | None, typer.Option("--block-size", help="Weights that share a scale, for recipes with blocks.")
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="Text to calibrate int8, int4 or static on; repeatable (default: bundled).",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude", metavar="PATTERN", help="Linears that stay in fp32, such as '*.down_proj'; repeatable."
        ),
    ] = None,
    per_channel: Annotated[
        bool | None,
        typer.Option(
            "--per-channel/--no-per-channel",
            help="One scale per output channel, for dynamic and static.",
            show_default=False,
        ),
    ] = None,
    reduce_range: Annotated[
        bool | None,
        typer.Option(
            "--reduce-range/--no-reduce-range",
            help="7-bit weights, for dynamic and static on CPUs without VNNI.",
            show_default=False,
        ),
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate/--no-gate", help="Refuse a package that is too far from its input.")
    ] = True,
    quiet: Quiet = False,
) -> None:
    """Write a quantized copy of an fp32 package."""
    from qwenonnx.quantize.options import QuantizeOptions
    from qwenonnx.quantize.quantizer import quantize_package

    source = open_package(package)
    target = output or beside(package, recipe)
    if target.resolve() != package.resolve():
        announce_replacing(target, quiet=quiet)
    options = QuantizeOptions(
        block_size=block_size,
        calibration=tuple(calibration or ()),
        exclude=tuple(exclude or ()),
        per_channel=per_channel,
        reduce_range=reduce_range,
        gate=gate,
    )
    with Stages(quiet=quiet) as stages:
        result = quantize_package(source, target, recipe, stage=stages.begin, options=options)
    if not quiet:
        say(f"{source.bytes / 1e6:,.0f} MB became {result.bytes / 1e6:,.0f} MB")
        say(describe_gate(result.manifest.details["gate"]))
    if warning := result.manifest.details["gate"].get("warning"):
        say(f"WARNING: {warning}")
    print(target)
