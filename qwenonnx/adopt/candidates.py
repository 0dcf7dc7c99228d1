"""Which graph of a folder is meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qwenonnx.errors import PackageError, UsageError
from qwenonnx.package.configuration import read_json
from qwenonnx.package.genai_config import GENAI_CONFIG, GenaiConfig
from qwenonnx.package.manifest import is_inside

# Where exporters put graphs: beside the other files (Optimum, genai), or below `onnx` (transformers.js).
FOLDERS = (".", "onnx")
# In the order in which they are taken: whole graphs before quantized ones, which have other names.
PREFERRED = (
    "model.onnx",
    "onnx/model.onnx",
    "decoder_model_merged.onnx",
    "onnx/decoder_model_merged.onnx",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The graph that was taken, and the others, as names below the folder."""

    taken: str
    others: tuple[str, ...]


def choose_graph(folder: Path, wanted: str | None) -> Choice:
    """Takes the graph that is asked for, or the one that is meant most likely.

    That is the one that genai_config.json names; else the first of `PREFERRED`; else the first by name.

    Raises:
        UsageError: the wanted file is not there or not in the folder.
        PackageError: there is no graph, or genai_config.json names none that is there.
    """
    found = list_graphs(folder)
    if wanted is not None:
        taken = _wanted(folder, wanted, found)
    elif (named := _named_by_genai(folder)) is not None:
        taken = named
    elif found:
        taken = next((name for name in PREFERRED if name in found), found[0])
    else:
        raise PackageError(
            f"{folder}: there is no .onnx file in it or in its folder onnx; name the folder that another program "
            "exported."
        )
    return Choice(taken, tuple(name for name in found if name != taken))


def list_graphs(folder: Path) -> list[str]:
    """Names of the .onnx files in a folder and in its folder `onnx`, sorted."""
    paths = [path for below in FOLDERS for path in (folder / below).glob("*.onnx") if path.is_file()]
    return sorted(str(path.relative_to(folder)) for path in paths)


def _wanted(folder: Path, wanted: str, found: Sequence[str]) -> str:
    name = wanted
    for prefix in (folder, folder.absolute()):  # a path that a shell has completed
        if Path(wanted).is_relative_to(prefix):
            name = str(Path(wanted).relative_to(prefix))
    name = str(Path(name))
    if is_inside(name) and (folder / name).is_file():
        return name
    choices = f"choose one of {', '.join(found)}" if found else "there is no .onnx file at all"
    raise UsageError(f"{wanted}: there is no such file in {folder}; {choices}.")


def _named_by_genai(folder: Path) -> str | None:
    path = folder / GENAI_CONFIG
    if not path.is_file():
        return None
    name = GenaiConfig.read(read_json(path), str(path)).filename
    if not is_inside(name) or not (folder / name).is_file():
        raise PackageError(f"{path}: it names the graph {name}, which is not in the folder; choose one with --file.")
    return name
