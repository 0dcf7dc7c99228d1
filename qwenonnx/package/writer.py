"""Finishing a package: what steps that write one have in common."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwenonnx.errors import PackageError
from qwenonnx.files import is_utf8, printable, write_text
from qwenonnx.package.manifest import DATA_NAME, MANIFEST_NAME, MODEL_NAME, FileEntry, Manifest, describe_files

TEXT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
# Written beside a package by other commands, and safe to lose when it is made anew.
EXPENDABLE = frozenset({MANIFEST_NAME, "qwenonnx.tune.json"})


# The entry in the details of a manifest that was written into somebody else's folder.
ADOPTED = "adopted"


def check_target(target: Path) -> None:
    """Checks that a package may be written to `target`: nothing there, an empty folder, or a package and no more.

    Raises:
        PackageError: `target` is a file, holds files that are not a package's, or its parent cannot be written; or
            its path is not UTF-8, the only encoding in which ONNX Runtime takes paths.
    """
    if not is_utf8(target):
        raise PackageError(f"{printable(target)}: this path is not UTF-8; choose another folder with -o.")
    parent = target.absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise PackageError(f"{target}: {parent} is a file, so no folder can be made in it; choose another one with -o.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PackageError(f"{target}: {parent} cannot be written to; choose another folder with -o.")
    if target.exists() and not target.is_dir():
        raise PackageError(f"{target}: this is a file; name a folder with -o.")
    if target.is_symlink():
        raise PackageError(f"{target}: this is a symbolic link; name the folder itself with -o.")
    if not target.is_dir():
        return
    present = {path.name for path in target.iterdir()}
    if not present:
        return
    known = _package_files(target) if MANIFEST_NAME in present else set()
    foreign = sorted(present - known - EXPENDABLE)
    if foreign:
        raise PackageError(
            f"{target}: holds files that are not part of a package ({', '.join(foreign[:3])}"
            f"{', …' if len(foreign) > 3 else ''}); nothing was written, so choose another folder with -o."
        )


def _package_files(folder: Path) -> set[str]:
    """Names of the files that this program wrote there.

    Raises:
        PackageError: somebody else wrote them, and only the manifest is this program's.
    """
    try:
        manifest = Manifest.read(folder)
        if ADOPTED not in manifest.details:
            return set(manifest.files)
    except PackageError:  # a damaged package, or another version's, may be made anew where it is
        return {MODEL_NAME, DATA_NAME, *TEXT_FILES}
    raise PackageError(f"{folder}: an adopted package, whose files are not replaced; choose another folder with -o.")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file with sorted keys."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def compact_json(path: Path) -> None:
    """Takes the white space out of a JSON file; half of a tokenizer's file is that."""
    value = json.loads(path.read_text(encoding="utf-8"))
    write_text(path, json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def finish_package(folder: Path, manifest: Manifest, names: Sequence[str] | None = None) -> Manifest:
    """Sums files of `folder` (all of them, or `names`) and writes the manifest; returns it as written."""
    files: dict[str, FileEntry] = describe_files(folder, names)
    complete = replace(manifest, files=files)
    write_text(folder / MANIFEST_NAME, complete.to_json())
    return complete


def tool_versions() -> dict[str, str]:
    """Versions that shaped a package's bytes."""
    from importlib.metadata import version

    from qwenonnx import __version__

    return {"qwenonnx": __version__, "onnx": version("onnx"), "onnxruntime": version("onnxruntime")}
