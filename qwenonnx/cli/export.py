"""`qwenonnx export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from qwenonnx.cli.console import Stages, say, silence
from qwenonnx.cli.fetch import fetch
from qwenonnx.cli.options import DEFAULT_MODELS_DIR, KNOWN_NAMES, ModelsDir, Quiet, output_folder
from qwenonnx.cli.packages import announce_replacing


class Exporter(StrEnum):
    """Who writes the graph."""

    FUSED = "fused"
    OPTIMUM = "optimum"


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
            help="The package (default: MODELS_DIR/<name>/fp32, or optimum-fp32).",
        ),
    ] = None,
    exporter: Annotated[
        Exporter,
        typer.Option(
            "--exporter",
            help="fused: this program's own graph, the fast one. optimum: the graph of Optimum, which other tools "
            "read too (needs torch: pip install 'qwenonnx[optimum]').",
        ),
    ] = Exporter.FUSED,
    models_dir: ModelsDir = DEFAULT_MODELS_DIR,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint as an fp32 ONNX package, and check it.

    The package has a KV cache and is compared with the checkpoint before it is put in place. A package that is
    there already is replaced.
    """
    from qwenonnx.checkpoint.open import open_checkpoint
    from qwenonnx.pull.sources import resolve_source

    write, folder = _writer(exporter)
    tell = silence if quiet else say
    resolved = resolve_source(source, models_dir)
    path = fetch(source, models_dir, quiet=quiet) if resolved.path is None else resolved.path
    target = output or models_dir / resolved.name / folder
    announce_replacing(target, quiet=quiet)
    with Stages(quiet=quiet) as stages:
        progress = stages.begin("opening the checkpoint")
        checkpoint = open_checkpoint(path)
        progress(1, 1)
        package = write(checkpoint, target, model=resolved.name, stage=stages.begin)
    check = package.manifest.details["verification"]
    tell(
        f"checked against the checkpoint on {check['positions']} tokens: largest logit difference "
        f"{check['max_logit_difference']:.1e}, same top token at {check['top1_agreement']:.0%}"
    )
    if (torch := package.manifest.details.get("pytorch")) is not None:
        tell(
            f"checked against PyTorch on {torch['positions']} tokens of {torch['texts']} texts: largest logit "
            f"difference {torch['largest_difference']:.1e}, same top token at {torch['same']}"
        )
    print(target)


def _writer(exporter: Exporter) -> tuple[Any, str]:
    """The function that exports, and the default name of its packages' folder.

    Raises:
        UsageError: it needs an extra that is not installed.
    """
    if exporter is Exporter.FUSED:
        from qwenonnx.export.exporter import export_checkpoint

        return export_checkpoint, "fp32"
    from qwenonnx.export.torch_extra import require_optimum

    require_optimum()  # before a checkpoint is downloaded
    from qwenonnx.export.optimum_exporter import export_through_optimum

    return export_through_optimum, "optimum-fp32"
