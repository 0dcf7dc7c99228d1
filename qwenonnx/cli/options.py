"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwenonnx.cli.console import check_results_path

ModelsDir = Annotated[Path, typer.Option("--models-dir", envvar="QWENONNX_MODELS_DIR", help="Where models are kept.")]
PackageFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The package.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only errors.")]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Also write the results here as JSON ('-': stdout).",
        callback=check_results_path,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, max=1024, help="Threads to compute with (default: what affinity and quota allow)."
    ),
]
DEFAULT_MODELS_DIR = Path("models")
