"""The packages that a command reads and writes, and hints for what is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from qwenonnx.cli.console import say
from qwenonnx.cli.options import DEFAULT_MODELS_DIR, MODELS_DIR_VARIABLE
from qwenonnx.errors import PackageError, UsageError

if TYPE_CHECKING:
    from qwenonnx.package.package import Package


def open_package(folder: Path) -> Package:
    """Opens the package that a user named.

    Raises:
        UsageError: it is the address of a server.
        PackageError: it is no package or a damaged one; where one that may be meant is near, that is named.
    """
    from qwenonnx.package.package import Package

    if not folder.exists():
        _refuse_address(folder)
        _hint_at_models(folder)
    return Package.open(folder)


def beside(package: Path, name: str) -> Path:
    """The folder of that name beside a package; relative if the package's is."""
    # The parent of `.` and `..` is not what the path says.
    parent = package.resolve().parent if package.name in ("", "..") else package.parent
    return parent / name


def announce_replacing(target: Path, *, quiet: bool) -> None:
    """Says that a package is about to be replaced, if there is one."""
    from qwenonnx.package.manifest import is_package

    if not quiet and is_package(target):
        say(f"replacing the package in {target}")


def _refuse_address(folder: Path) -> None:
    scheme, colon, rest = str(folder).partition(":/")  # a path has lost the second slash
    if colon and scheme in ("http", "https"):
        raise UsageError(f"{scheme}://{rest}: this is an address, not a package's folder; only `chat` takes addresses.")


def _hint_at_models(folder: Path) -> None:
    """Looks for a model's name, or a path that was meant from the models' folder."""
    from qwenonnx.package.manifest import is_package, one_of, packages_in
    from qwenonnx.pull.catalog import find_entry

    models = Path(os.environ.get(MODELS_DIR_VARIABLE) or DEFAULT_MODELS_DIR)
    entry = find_entry(str(folder))
    name = str(folder) if entry is None else entry.name
    if is_package(models / name):
        raise PackageError(f"{folder}: no such folder; did you mean {models / name}?")
    if near := packages_in(models / name):
        raise PackageError(f"{folder}: no such folder; did you mean {one_of(near)}?")
    if entry is not None:
        raise PackageError(
            f"{folder}: no package of this model is in {models}; make one with `qwenonnx export {name}`."
        )
