"""A checkpoint as a folder that transformers reads, for tools that know no other form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwenonnx.checkpoint.layout import expected_shapes
from qwenonnx.checkpoint.safetensors import INDEX_FILE
from qwenonnx.config import ModelConfig
from qwenonnx.graph.weights import Weights
from qwenonnx.package.writer import write_json

_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_safetensors_folder(weights: Weights, config: ModelConfig, hf_config: Mapping[str, Any], folder: Path) -> None:
    """Writes config.json and fp32 weights, a file a part of the model, so that memory holds one part at a time.

    The configuration is written anew in the form that every version of transformers reads; of `hf_config`, only the
    ids of the special tokens are kept.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    tokens = {name: hf_config[name] for name in _TOKEN_FIELDS if hf_config.get(name) is not None}
    write_json(folder / "config.json", {**config.to_hf(), **tokens, "torch_dtype": "float32"})
    parts: dict[str, list[str]] = {}
    for name in expected_shapes(config):
        parts.setdefault(_part_of(name), []).append(name)
    weight_map: dict[str, str] = {}
    size = 0
    for number, names in enumerate(parts.values(), 1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors = {name: weights.tensor(name) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
        size += sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _part_of(name: str) -> str:
    """A layer, or a tensor by itself."""
    return ".".join(name.split(".")[:3])
