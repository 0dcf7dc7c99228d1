"""The evaluation texts that come with the program, and those that users bring."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from qwenonnx.errors import UsageError


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """A named text; control tokens in it are read as such."""

    name: str
    text: str


def bundled_texts() -> list[EvaluationText]:
    """Short texts written for this project: prose in 14 languages, code in five, two chats; sorted by name."""
    return [EvaluationText(name, text) for name, text in packaged_texts("qwenonnx.evaluate", "texts")]


def read_texts(paths: list[Path]) -> list[EvaluationText]:
    """Texts from files, named by the file.

    Raises:
        UsageError: a file cannot be read as UTF-8, or is empty.
    """
    return [EvaluationText(path.name, read_text(path)) for path in paths]


def packaged_texts(package: str, folder: str) -> list[tuple[str, str]]:
    """Name without suffix and content of each `.txt` file in a folder of an installed package, sorted by name."""
    files = (resources.files(package) / folder).iterdir()
    return sorted(
        (file.name.removesuffix(".txt"), file.read_text(encoding="utf-8"))
        for file in files
        if file.name.endswith(".txt")
    )


def read_text(path: Path) -> str:
    """The text of a file that a user named.

    Raises:
        UsageError: the file cannot be read as UTF-8, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as UTF-8 text ({error}).") from error
    if not text.strip():
        raise UsageError(f"{path}: this text is empty; give one with at least a few words.")
    return text
