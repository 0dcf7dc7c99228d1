"""`qwenonnx export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwenonnx.cli.console import Stages, say, silence
from qwenonnx.cli.options import DEFAULT_MODELS_DIR, ModelsDir, Quiet


def export(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Checkpoint folder, .gguf file, known name or hub id.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="The package (default: MODELS_DIR/<name>/fp32)."),
    ] = None,
    models_dir: ModelsDir = DEFAULT_MODELS_DIR,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint as an fp32 ONNX package with a KV cache, and check it against the checkpoint."""
    from qwenonnx.checkpoint.open import open_checkpoint
    from qwenonnx.export.exporter import export_checkpoint
    from qwenonnx.pull.pull import pull
    from qwenonnx.pull.sources import resolve_source

    tell = silence if quiet else say
    resolved = resolve_source(source, models_dir)
    path = pull(source, models_dir, tell) if resolved.path is None else resolved.path
    target = output or models_dir / resolved.name / "fp32"
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
