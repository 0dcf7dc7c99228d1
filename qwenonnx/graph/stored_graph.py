"""Reading a graph file without its weights."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import onnx

from qwenonnx.errors import PackageError


def load_graph(path: Path) -> Any:
    """The model in a file, external weights left where they are.

    Raises:
        PackageError: the file is no ONNX model.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's exceptions share no public base class
        if zipfile.is_zipfile(path):
            raise PackageError(
                f"{path}: this is a zip archive, not an ONNX model; unpack it, or export the model again."
            ) from error
        raise PackageError(f"{path}: this is no ONNX model ({error}); export it again.") from error
    if not model.graph.node:
        raise PackageError(f"{path}: this is no ONNX model, there is nothing in it; export it again.")
    return model
