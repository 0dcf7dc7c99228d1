"""The texts that recipes are calibrated on: those that come with the program, and those that users bring."""

from __future__ import annotations

from pathlib import Path

from qwenonnx.evaluate.texts import packaged_texts, read_text


def bundled_calibration() -> list[str]:
    """Texts written for this project, sorted by name: prose, code, chats, a tool call, a document and tables.

    They share no sentence with the evaluation texts, so that a fidelity measured on those is not flattered. Control
    tokens in them are read as such.
    """
    return [text for _, text in packaged_texts("qwenonnx.quantize", "calibration")]


def read_calibration(paths: list[Path]) -> list[str]:
    """Texts from files, in the order given.

    Raises:
        UsageError: a file cannot be read as UTF-8, or is empty.
    """
    return [read_text(path) for path in paths]
