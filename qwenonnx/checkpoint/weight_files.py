"""What the two file formats have in common: mapping a file, naming it, hashing it."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from pathlib import Path

from qwenonnx.checkpoint.base import CheckpointSource
from qwenonnx.errors import CheckpointError
from qwenonnx.files import sha256_file

RE_DOWNLOAD = "the file is damaged or its download was cut short, so re-download it"


def map_file(path: Path) -> mmap.mmap:
    """Maps a file for reading; nothing is read until it is used.

    Raises:
        CheckpointError: the file is missing, unreadable, empty, or no regular file.
    """
    require_regular(path)
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise CheckpointError(f"{path}: the file is empty; {RE_DOWNLOAD}.") from error
    except OSError as error:
        raise CheckpointError(f"{path}: the file cannot be read ({error.strerror}).") from error


def require_regular(path: Path) -> None:
    """Checks that what lies at `path`, if anything, is a file that can be read to its end.

    Raises:
        CheckpointError: it is a folder, a pipe (reading which could wait for ever), a device or the like.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "no regular file"
        raise CheckpointError(f"{path}: this is {kind}, but a file is expected; put the file itself there.")


def release_pages(mapping: mmap.mmap) -> None:
    """Takes a map's pages out of this process's memory; they stay in the system's cache and come back when used."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)


def folder_name(folder: Path) -> str:
    """A name for the checkpoint in `folder`: the model's where the layout of the folders tells it.

    Knows `models/<name>/checkpoint` and the hub cache's `models--<owner>--<name>/snapshots/<revision>`.
    """
    folder = folder.absolute()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return folder.parent.name if folder.name == "checkpoint" else folder.name


def describe_source(kind: str, name: str, paths: Sequence[Path]) -> CheckpointSource:
    """Hashes the weight files, which reads each of them once, in chunks."""
    paths = sorted(paths, key=lambda path: path.name)
    hashes = [sha256_file(path) for path in paths]
    if len(hashes) == 1:
        combined = hashes[0]
    else:
        lines = "".join(f"{digest}  {path.name}\n" for digest, path in zip(hashes, paths, strict=True))
        combined = hashlib.sha256(lines.encode()).hexdigest()
    return CheckpointSource(
        kind=kind,
        name=name,
        files=tuple(path.name for path in paths),
        bytes=sum(path.stat().st_size for path in paths),
        sha256=combined,
    )
