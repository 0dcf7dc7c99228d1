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
    """Short texts written for this project: prose in five languages, code in two, one chat."""
    folder = resources.files("qwenonnx.evaluate") / "texts"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".txt")), key=lambda file: file.name)
    return [EvaluationText(file.name.removesuffix(".txt"), file.read_text(encoding="utf-8")) for file in files]


def read_texts(paths: list[Path]) -> list[EvaluationText]:
    """Texts from files, named by the file.

    Raises:
        UsageError: a file cannot be read as UTF-8, or is empty.
    """
    texts = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: cannot be read as UTF-8 text ({error}).") from error
        if not text.strip():
            raise UsageError(f"{path}: this text is empty; give one with at least a few words.")
        texts.append(EvaluationText(path.name, text))
    return texts
