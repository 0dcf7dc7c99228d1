"""The model's configuration as a package's folder has it, in one of two forms."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwenonnx.config import ModelConfig
from qwenonnx.errors import PackageError
from qwenonnx.package.genai_config import GENAI_CONFIG, GenaiConfig

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Configuration:
    """The model's sizes, the generation config (empty where there is none), and the name of the file of the sizes."""

    model: ModelConfig
    generation: dict[str, Any]
    file: str

    @classmethod
    def read(cls, folder: Path, names: Collection[str]) -> Configuration:
        """Reads it from the files of a folder that are among `names`.

        config.json comes first, and genai_config.json stands in for it. So does its search section for a missing
        generation_config.json.

        Raises:
            PackageError: neither is among `names`, or a file cannot be read.
            CheckpointError: config.json is of another model.
        """
        genai = _genai(folder) if GENAI_CONFIG in names else None
        if CONFIG in names:
            path = folder / CONFIG
            model, file = ModelConfig.from_hf(read_json(path), str(path)), CONFIG
        elif genai is not None:
            model, file = genai.model, GENAI_CONFIG
        else:
            raise PackageError(f"{folder}: its manifest does not list {CONFIG}; make the package again.")
        generation = folder / GENERATION_CONFIG
        if generation.is_file():
            return cls(model, read_json(generation), file)
        return cls(model, {} if genai is None else genai.generation, file)


def _genai(folder: Path) -> GenaiConfig:
    path = folder / GENAI_CONFIG
    return GenaiConfig.read(read_json(path), str(path))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        PackageError: the file is missing, damaged, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PackageError(f"{path}: cannot be read ({error}); make the package again.") from error
    if not isinstance(value, dict):
        raise PackageError(f"{path}: expected a JSON object; make the package again.")
    return value
