"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwenonnx.cli.console import check_results_path
from qwenonnx.errors import UsageError
from qwenonnx.pull.catalog import ENTRIES

MODELS_DIR_VARIABLE = "QWENONNX_MODELS_DIR"
KNOWN_NAMES = ", ".join(entry.name for entry in ENTRIES)


def output_folder(text: str) -> Path:
    """The folder that an option names.

    Raises:
        UsageError: it names none.
    """
    if not text:
        raise UsageError("The output folder is an empty text; name a folder with -o, or leave the option out.")
    return Path(text)


ModelsDir = Annotated[
    Path, typer.Option("--models-dir", metavar="DIR", envvar=MODELS_DIR_VARIABLE, help="Where models are kept.")
]
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
        "--threads",
        metavar="N",
        min=1,
        max=1024,
        help="Threads to compute with (default: what affinity and quota allow).",
    ),
]
DEFAULT_MODELS_DIR = Path("models")
