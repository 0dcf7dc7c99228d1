"""A package on disk: opened, checked and described."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenonnx.config import ModelConfig
from qwenonnx.errors import PackageError
from qwenonnx.files import Progress, is_utf8, printable, sha256_file
from qwenonnx.package.configuration import Configuration
from qwenonnx.package.manifest import Manifest

_REQUIRED = ("tokenizer.json", "tokenizer_config.json")

# Files up to this size are checked by their sum on every opening; larger ones by their size only.
SMALL_FILE = 16 << 20


@dataclass(frozen=True, slots=True)
class Package:
    """A folder whose manifest, files and sizes have been found in order."""

    folder: Path
    manifest: Manifest
    config: ModelConfig
    generation_config: dict[str, Any]

    @property
    def model_path(self) -> Path:
        """The graph."""
        return self.folder / self.manifest.model_file

    @property
    def data_paths(self) -> tuple[Path, ...]:
        """The files of weights beside the graph; none where it holds them itself."""
        return tuple(self.folder / name for name in self.manifest.data_files)

    @property
    def bytes(self) -> int:
        """Size of all files on disk."""
        return sum(entry.bytes for entry in self.manifest.files.values())

    @classmethod
    def open(cls, folder: Path) -> Package:
        """Opens a package and checks that nothing is missing, cut off or changed in the small files.

        Raises:
            PackageError: the folder is no package or a damaged one; the message names the file.
        """
        if not is_utf8(folder):  # ONNX Runtime takes paths as text
            raise PackageError(f"{printable(folder)}: this path is not UTF-8; rename the folder.")
        manifest = Manifest.read(folder)
        for name in (manifest.model_file, *manifest.data_files, *_REQUIRED):
            if name not in manifest.files:
                raise PackageError(f"{folder}: its manifest does not list {name}; make the package again.")
        for name, entry in manifest.files.items():
            path = folder / name
            if not path.is_file():
                raise PackageError(f"{path}: this file of the package is missing; make the package again.")
            size = path.stat().st_size
            if size != entry.bytes:
                raise PackageError(
                    f"{path}: {size:,} bytes, but the manifest says {entry.bytes:,}; make the package again."
                )
            if size <= SMALL_FILE:
                _check_sum(path, entry.sha256)
        configuration = Configuration.read(folder, manifest.files)
        config = configuration.model
        if manifest.num_tokens > config.vocab_size or manifest.context_length > config.context_length:
            raise PackageError(
                f"{folder}: its manifest has {manifest.num_tokens:,} tokens and a context of "
                f"{manifest.context_length:,}, more than the {config.vocab_size:,} and {config.context_length:,} of "
                f"{configuration.file}; make the package again."
            )
        return cls(folder=folder, manifest=manifest, config=config, generation_config=configuration.generation)

    def check_sums(self, progress: Progress | None = None) -> None:
        """Reads every file and compares its SHA-256 with the manifest.

        Raises:
            PackageError: a file was changed; the message names it.
        """
        done = 0
        for name, entry in self.manifest.files.items():
            before = done

            def advance(count: int) -> None:
                nonlocal done
                done += count
                if progress is not None:
                    progress(done, self.bytes)

            _check_sum(self.folder / name, entry.sha256, advance)
            done = before + entry.bytes


def _check_sum(path: Path, expected: str, advance: Any = None) -> None:
    if sha256_file(path, advance) != expected:
        raise PackageError(f"{path}: the content does not match its sum in the manifest; make the package again.")
