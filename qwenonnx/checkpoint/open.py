"""Opening a checkpoint, whatever its format."""

from __future__ import annotations

from pathlib import Path

from qwenonnx.checkpoint.base import Checkpoint
from qwenonnx.checkpoint.gguf import GgufCheckpoint
from qwenonnx.checkpoint.safetensors import INDEX_FILE, SafetensorsCheckpoint
from qwenonnx.checkpoint.weight_files import require_regular
from qwenonnx.errors import CheckpointError

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder with config.json and safetensors files, a `.gguf` file, or a folder with one such file.

    What counts is the content, not the name. Everything but the values is checked before this returns.

    Raises:
        CheckpointError: there is no such thing at `path`, or it is damaged or not supported.
    """
    if not path.exists():
        dangling = " (it is a symbolic link to something that is not there)" if path.is_symlink() else ""
        raise CheckpointError(f"{path}: there is no such file or folder{dangling}.")
    return _open_folder(path) if path.is_dir() else _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    require_regular(path)
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        raise CheckpointError(f"{path}: the file cannot be read ({error.strerror}).") from error
    if not is_gguf and path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path}: a safetensors file holds weights only; name its folder, which also has config.json."
        )
    # Anything else is taken for GGUF, whose reader says clearly when it is not.
    return GgufCheckpoint(path)


def _open_folder(folder: Path) -> Checkpoint:
    if any(folder.glob("*.safetensors")) or (folder / INDEX_FILE).exists():
        return SafetensorsCheckpoint(folder)
    gguf_files = sorted(folder.glob("*.gguf"))
    if len(gguf_files) == 1:
        return GgufCheckpoint(gguf_files[0])
    if gguf_files:
        names = ", ".join(path.name for path in gguf_files)
        raise CheckpointError(f"{folder}: there are several GGUF files ({names}); name the one to use.")
    pickles = [path.name for pattern in _PICKLES for path in sorted(folder.glob(pattern))]
    if pickles:
        raise CheckpointError(
            f"{folder}: the weights are in PyTorch's pickle format ({pickles[0]}), which can run code when "
            "loaded; convert them to safetensors (transformers: model.save_pretrained(folder, "
            "safe_serialization=True))."
        )
    raise CheckpointError(
        f"{folder}: there is no checkpoint here; a config.json with *.safetensors files, or one .gguf file, "
        "is expected."
    )
