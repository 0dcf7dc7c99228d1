"""What a checkpoint is to the rest of the program: a configuration, named fp32 tensors and text files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """Where the weights came from; written into the package's manifest.

    `sha256` covers the weight files (of several files: the hash over their names and hashes, sorted by name).
    """

    kind: str
    name: str
    files: tuple[str, ...]
    bytes: int
    sha256: str


class Checkpoint(Protocol):
    """A Qwen2 checkpoint that is known to be whole: opening one checks everything but the values.

    Tensor names are the Hugging Face ones (`model.layers.0.self_attn.q_proj.weight`), whatever the file
    format.
    """

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model; `tie_word_embeddings` tells whether `lm_head.weight` is absent."""

    @property
    def hf_config(self) -> dict[str, Any]:
        """The config.json to put beside the graph (the original one where there was one)."""

    @property
    def generation_config(self) -> dict[str, Any]:
        """The generation_config.json, possibly empty."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading its values."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Reads one tensor as fp32, `[out_features, in_features]` for linears; memory is the caller's.

        Raises:
            CheckpointError: no tensor has that name.
        """

    def write_tokenizer(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json` (with the chat template) into `folder`."""

    def source(self) -> CheckpointSource:
        """Describes the origin; reads all weight files once to hash them."""
