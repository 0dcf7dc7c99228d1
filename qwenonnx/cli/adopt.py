"""`qwenonnx adopt`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwenonnx.cli.console import Stages, say, silence
from qwenonnx.cli.options import Quiet
from qwenonnx.errors import UsageError


def adopt(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder with an ONNX graph.", show_default=False)],
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="The graph, below DIR (default: what genai_config.json names, model.onnx, or onnx/model.onnx).",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The model's name (default: the folder's).")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Make a folder that another program exported a package.

    Folders of Optimum, transformers.js and onnxruntime-genai are known. The graph is checked and run once; only
    qwenonnx.json is written, and everything else stays as it is.
    """
    from qwenonnx.adopt.adopter import adopt_folder, describe_others

    if name is not None and not name.strip():
        raise UsageError("The model's name is an empty text; give one with --name, or leave the option out.")

    tell = silence if quiet else say
    with Stages(quiet=quiet) as stages:
        adoption = adopt_folder(folder, file=file, name=name, stage=stages.begin)
    manifest = adoption.package.manifest
    tell(f"took {manifest.model_file}: {manifest.recipe}, a {manifest.graph} graph")
    if adoption.others:
        tell(f"also there: {describe_others(adoption.others)}; --file chooses another one")
    if not adoption.has_chat_template:
        tell("there is no chat template, so it completes prompts, but answers no chats")
    print(folder)
