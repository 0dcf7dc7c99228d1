"""The texts that recipes are calibrated on: those that come with the program, and those that users bring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qwenonnx.errors import QuantizeError
from qwenonnx.evaluate.texts import packaged_texts, read_text
from qwenonnx.package.package import Package
from qwenonnx.text.tokenizer import Tokenizer

CALIBRATION_TOKENS = 512


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


def calibration_ids(source: Package, paths: Sequence[Path]) -> list[list[int]]:
    """Token ids of the beginning of each text: of the files that a user named, or of the bundled ones.

    Raises:
        UsageError: a file cannot be read as UTF-8, or is empty.
        QuantizeError: no text has two tokens.
    """
    tokenizer = Tokenizer.load(source.folder)
    texts = read_calibration(list(paths)) if paths else bundled_calibration()
    limit = min(CALIBRATION_TOKENS, source.manifest.context_length)
    usable = [ids for text in texts if len(ids := tokenizer.encode(text)[:limit]) > 1]
    if not usable:
        raise QuantizeError("the calibration texts hold no two tokens together; give longer ones.")
    return usable
