"""The manifest of a package: `qwenonnx.json`, written last, without which a folder is not a package."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from qwenonnx.errors import PackageError
from qwenonnx.files import sha256_file

MANIFEST_NAME = "qwenonnx.json"
MODEL_NAME = "model.onnx"
DATA_NAME = "model.onnx.data"
FORMAT = 1
_FIELD_TYPES: Mapping[str, type] = {
    "model": str,
    "graph": str,
    "recipe": str,
    "context_length": int,
    "num_tokens": int,
    "end_token_ids": list,
    "inputs": list,
    "outputs": list,
    "source": dict,
    "versions": dict,
    "details": dict,
}
_OPTIONAL: Mapping[str, type] = {"model_file": str, "data_files": list}
_ITEM_TYPES: Mapping[str, type] = {
    "end_token_ids": int,
    "inputs": str,
    "outputs": str,
    "versions": str,
    "data_files": str,
}
GRAPHS = ("fused", "portable", "genai")
# Categories of characters that a name on one line cannot hold: controls, halves of pairs, ends of lines.
_NO_TEXT = frozenset({"Cc", "Cs", "Zl", "Zp"})


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and SHA-256 of one file of the package."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a package is, where it comes from and what it is made of.

    It holds no times and no absolute paths, so equal inputs give equal bytes. `recipe` is how the linears are
    stored (`fp32`, `int8`, …), `num_tokens` the rows of the vocabulary that the tokenizer defines, and `details` the
    choices and measurements of the step that wrote the package.

    `graph` is the kind of graph: `fused` (this program's own), `portable` (a growing cache with an attention mask, as
    Optimum writes it) or `genai` (GroupQueryAttention with an attention mask). `model_file` and `data_files` are the
    graph and its weights; other files of a folder that somebody else wrote are not listed.
    """

    model: str
    graph: str
    recipe: str
    context_length: int
    num_tokens: int
    end_token_ids: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: Mapping[str, Any]
    versions: Mapping[str, str]
    details: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    model_file: str = MODEL_NAME
    data_files: tuple[str, ...] = (DATA_NAME,)
    format: int = FORMAT

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the manifest of a package.

        Raises:
            PackageError: there is none, or it cannot be understood.
        """
        path = folder / MANIFEST_NAME
        if not folder.is_dir():
            raise PackageError(_no_folder(folder))
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            near = packages_in(folder)
            remedy = f"did you mean {one_of(near)}?" if near else "make one with `qwenonnx export`."
            raise PackageError(f"{folder}: not a package, there is no {MANIFEST_NAME} in it; {remedy}") from None
        except (OSError, ValueError) as error:
            raise PackageError(f"{path}: cannot be read ({error}); export the package again.") from error
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            found = raw.get("format") if isinstance(raw, dict) else None
            raise PackageError(
                f"{path}: package format {found!r} is not {FORMAT}, the one that this version reads; export it again."
            )
        try:
            _check_types(raw)
            files = {name: FileEntry(**entry) for name, entry in raw.pop("files").items()}
            for name in ("end_token_ids", "inputs", "outputs", "data_files"):
                if name in raw:
                    raw[name] = tuple(raw[name])
            return cls(**raw, files=files)
        except (KeyError, TypeError, AttributeError) as error:
            raise PackageError(f"{path}: damaged manifest ({error}); export the package again.") from error


def is_package(folder: Path) -> bool:
    """Whether a folder says that it is a package; nothing in it is read."""
    return (folder / MANIFEST_NAME).is_file()


def packages_in(folder: Path) -> list[Path]:
    """The sub-folders that say they are packages, by name; none where there is no such folder."""
    return sorted(path.parent for path in folder.glob(f"*/{MANIFEST_NAME}"))


def one_of(folders: Sequence[Path]) -> str:
    """A choice of folders in words; of many, the first few."""
    return " or ".join(str(folder) for folder in folders[:3])


def _no_folder(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: no such folder; make a package with `qwenonnx export`."
    remedy = f"did you mean {folder.parent}?" if is_package(folder.parent) else "make one with `qwenonnx export`."
    return f"{folder}: this is a file, not a package's folder; {remedy}"


def clean_name(name: str) -> str:
    """A model's name as a manifest may hold it: control characters and broken ones are replaced."""
    return "".join("_" if unicodedata.category(character) in _NO_TEXT else character for character in name) or "model"


def _check_types(raw: Mapping[str, Any]) -> None:
    present = {name: kind for name, kind in _OPTIONAL.items() if name in raw}
    for name, kind in {**_FIELD_TYPES, **present}.items():
        if type(raw[name]) is not kind:
            raise TypeError(f"{name} is {raw[name]!r}")
    for name, kind in _ITEM_TYPES.items():
        if name not in raw:
            continue
        items = raw[name].values() if isinstance(raw[name], dict) else raw[name]
        if wrong := [item for item in items if type(item) is not kind]:
            raise TypeError(f"{name} has {wrong[0]!r}")
    if raw["model"] != clean_name(raw["model"]):
        raise TypeError(f"model is {raw['model']!r}")
    for name in ("context_length", "num_tokens"):
        if raw[name] < 1:
            raise TypeError(f"{name} is {raw[name]}")
    if wrong := [token_id for token_id in raw["end_token_ids"] if not 0 <= token_id < raw["num_tokens"]]:
        raise TypeError(f"end_token_ids has {wrong[0]}, but there are {raw['num_tokens']} tokens")
    for name, entry in raw["files"].items():
        sound = is_inside(name) and type(entry["bytes"]) is int and entry["bytes"] >= 0
        if not sound or not isinstance(entry["sha256"], str):
            raise TypeError(f"the entry of the file {name!r} is wrong")


def is_inside(name: str) -> bool:
    """Whether the name of a file, with folders separated by `/`, cannot lead out of the package's folder."""
    path = PurePosixPath(name)
    return str(path) == name and name != "." and not path.is_absolute() and ".." not in path.parts


def describe_files(folder: Path, names: Sequence[str] | None = None) -> dict[str, FileEntry]:
    """Sizes and sums of files of a folder, by name: of `names`, or of all that lie in it."""
    if names is None:
        names = [path.name for path in folder.iterdir() if path.is_file() and path.name != MANIFEST_NAME]
    return {
        name: FileEntry(bytes=(folder / name).stat().st_size, sha256=sha256_file(folder / name))
        for name in sorted(names)
    }
