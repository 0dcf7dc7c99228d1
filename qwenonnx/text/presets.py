"""System prompts that come with the program, by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_FILE = Path(__file__).parent / "presets.json"


@dataclass(frozen=True, slots=True)
class Preset:
    """A system prompt and what people call it."""

    title: str
    system: str


def presets_json() -> str:
    """The file: an object of `{name: {title, system}}`."""
    return _FILE.read_text(encoding="utf-8")


def load_presets() -> Mapping[str, Preset]:
    """All presets by name, in the file's order."""
    return {name: Preset(**entry) for name, entry in json.loads(presets_json()).items()}
