"""SOURCE on the command line: a path, a model's name, or a hub id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qwenonnx.checkpoint.weight_files import folder_name
from qwenonnx.errors import UsageError
from qwenonnx.pull.catalog import ENTRIES
from qwenonnx.pull.pull import checkpoint_folder, is_pulled, model_name


@dataclass(frozen=True, slots=True)
class ResolvedSource:
    """What SOURCE stands for: `path` is where the checkpoint is, None if `pull` has to fetch it first."""

    name: str
    path: Path | None

    @property
    def needs_pull(self) -> bool:
        """Whether the checkpoint is not on disk yet."""
        return self.path is None


def resolve_source(source: str, models_dir: Path) -> ResolvedSource:
    """Finds out what SOURCE means; an existing path wins over a name or hub id that reads the same.

    Raises:
        UsageError: it is a path to nothing, or neither a known name nor a hub id.
    """
    path = Path(source)
    if source and path.exists():
        name = folder_name(path) if path.is_dir() else path.stem
        return ResolvedSource(name.rpartition("/")[2].lower(), path)
    if not source or _looks_like_path(source):
        names = ", ".join(entry.name for entry in ENTRIES)
        raise UsageError(
            f"{source or 'SOURCE'}: there is no such file or folder; name one that exists, a hub id "
            f"(owner/name), or a known model: {names}."
        )
    name = model_name(source)
    return ResolvedSource(name, checkpoint_folder(models_dir, name) if is_pulled(models_dir, name) else None)


def _looks_like_path(source: str) -> bool:
    return (
        source.startswith(("/", "./", "../", "~"))
        or source.endswith("/")
        or source.count("/") > 1
        or (source.endswith((".gguf", ".safetensors")) and ":" not in source)
    )
