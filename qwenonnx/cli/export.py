"""`qwenonnx export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwenonnx.cli.console import Stages, say, silence
from qwenonnx.cli.fetch import fetch
from qwenonnx.cli.options import DEFAULT_MODELS_DIR, KNOWN_NAMES, ModelsDir, Quiet, output_folder
from qwenonnx.cli.packages import announce_replacing


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help=f"Checkpoint folder, .gguf file, hub id (owner/name), or known name: {KNOWN_NAMES}."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            parser=output_folder,
            help="The package (default: MODELS_DIR/<name>/fp32).",
        ),
    ] = None,
    models_dir: ModelsDir = DEFAULT_MODELS_DIR,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint as an fp32 ONNX package, and check it.

    The package has a KV cache and is compared with the checkpoint before it is put in place. A package that is
    there already is replaced.
    """
    from qwenonnx.checkpoint.open import open_checkpoint
    from qwenonnx.export.exporter import export_checkpoint
    from qwenonnx.pull.sources import resolve_source

    tell = silence if quiet else say
    resolved = resolve_source(source, models_dir)
    path = fetch(source, models_dir, quiet=quiet) if resolved.path is None else resolved.path
    target = output or models_dir / resolved.name / "fp32"
    announce_replacing(target, quiet=quiet)
    with Stages(quiet=quiet) as stages:
        progress = stages.begin("opening the checkpoint")
        checkpoint = open_checkpoint(path)
        progress(1, 1)
        package = export_checkpoint(checkpoint, target, model=resolved.name, stage=stages.begin)
    check = package.manifest.details["verification"]
    tell(
        f"checked against the checkpoint on {check['positions']} tokens: largest logit difference "
        f"{check['max_logit_difference']:.1e}, same top token at {check['top1_agreement']:.0%}"
    )
    print(target)
