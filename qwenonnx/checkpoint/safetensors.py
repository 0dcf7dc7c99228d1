"""Checkpoints in the Hugging Face layout: config.json, safetensors files and a tokenizer in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwenonnx.checkpoint.base import CheckpointSource
from qwenonnx.checkpoint.layout import EMBEDDING, HEAD, check_shapes, expected_shapes
from qwenonnx.checkpoint.safetensors_file import SafetensorsFile
from qwenonnx.checkpoint.tokenizer_files import (
    check_end_token_ids,
    find_tokenizer,
    read_json_object,
    write_folder_tokenizer,
)
from qwenonnx.checkpoint.weight_files import RE_DOWNLOAD, describe_source, folder_name
from qwenonnx.config import ModelConfig
from qwenonnx.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_READABLE = ("F32", "F16", "BF16")
_COMPARE_BYTES = 1 << 24


class SafetensorsCheckpoint:
    """A Hugging Face folder with safetensors weights; satisfies `Checkpoint`.

    Opening reads the headers of all files and checks them against each other and against config.json. Weights
    are mapped, not loaded. Files that the index does not list are ignored.

    Raises:
        CheckpointError: something is missing, damaged or not supported.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config_path = folder / "config.json"
        if not config_path.exists():
            raise CheckpointError(f"{folder}: there are safetensors files but no config.json; download it as well.")
        self._hf_config = read_json_object(config_path)
        self._config = ModelConfig.from_hf(self._hf_config, str(config_path))
        _refuse_quantized(self._hf_config, config_path)
        generation_path = folder / "generation_config.json"
        self._generation_config = read_json_object(generation_path) if generation_path.exists() else {}
        for content, path in ((self._hf_config, config_path), (self._generation_config, generation_path)):
            check_end_token_ids(content, self._config.vocab_size, str(path))
        find_tokenizer(folder)
        self._files = self._open_files()
        self._check_tensors()

    @property
    def config(self) -> ModelConfig:
        """Sizes of the model."""
        return self._config

    @property
    def hf_config(self) -> dict[str, Any]:
        """The content of config.json."""
        return dict(self._hf_config)

    @property
    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json, empty if there is none."""
        return dict(self._generation_config)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading its values."""
        return self._file_of(name).entries[name].shape

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Reads one tensor as fp32 into memory of its own."""
        return self._file_of(name).read(name)

    def write_tokenizer(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json` into `folder`."""
        write_folder_tokenizer(self._folder, folder, self._config.vocab_size)

    def source(self) -> CheckpointSource:
        """Describes the weight files and hashes them."""
        paths = {file.path for file in self._files.values()}
        return describe_source("safetensors", folder_name(self._folder), list(paths))

    def _file_of(self, name: str) -> SafetensorsFile:
        try:
            return self._files[name]
        except KeyError:
            raise CheckpointError(f"{self._folder}: there is no tensor {name}.") from None

    def _open_files(self) -> dict[str, SafetensorsFile]:
        single, index = self._folder / SINGLE_FILE, self._folder / INDEX_FILE
        if not single.exists() and index.exists():
            return self._open_shards(index)
        if not single.exists():
            found = sorted(self._folder.glob("*.safetensors"))
            if len(found) != 1:
                names = ", ".join(path.name for path in found)
                raise CheckpointError(
                    f"{self._folder}: there are several weight files ({names}) but no {INDEX_FILE} that "
                    "says which belong to the model; download the index as well."
                )
            single = found[0]
        file = SafetensorsFile(single)
        return dict.fromkeys(file.entries, file)

    def _open_shards(self, index: Path) -> dict[str, SafetensorsFile]:
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) and name == Path(name).name for name in weight_map.values()
        ):
            raise CheckpointError(f"{index}: weight_map does not map tensors to file names; {RE_DOWNLOAD}.")
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (self._folder / name).exists()]
        if missing:
            raise CheckpointError(
                f"{self._folder}: {len(missing)} of {len(names)} weight files that {index.name} lists are "
                f"missing: {', '.join(missing)}; download them."
            )
        files = {name: SafetensorsFile(self._folder / name) for name in names}
        for tensor, name in weight_map.items():
            if tensor not in files[name].entries:
                raise CheckpointError(
                    f"{files[name].path}: {index.name} says that tensor {tensor} is here, but it is not; {RE_DOWNLOAD}."
                )
        return {tensor: files[name] for tensor, name in weight_map.items()}

    def _check_tensors(self) -> None:
        packed = next((name for name in self._files if name.endswith((".qweight", ".weight_packed"))), None)
        if packed is not None:
            raise _quantized_error(self._folder, f"it holds {packed}")
        check_shapes(self._config, {name: self.shape(name) for name in self._files}, str(self._folder))
        needed = list(expected_shapes(self._config))
        if HEAD in self._files:
            needed.append(HEAD)
        for name in needed:
            dtype = self._files[name].entries[name].dtype
            if dtype not in _READABLE:
                raise _quantized_error(self._files[name].path, f"tensor {name} is stored as {dtype}")
        if self._config.tie_word_embeddings and HEAD in self._files and not self._head_is_embedding():
            raise CheckpointError(
                f"{self._folder}: config.json says that the head is tied to the embedding, but {HEAD} "
                f"differs from {EMBEDDING}; set tie_word_embeddings to false in config.json to use that head."
            )

    def _head_is_embedding(self) -> bool:
        first, second = self._files[HEAD], self._files[EMBEDDING]
        if (first.entries[HEAD].dtype, self.shape(HEAD)) != (
            second.entries[EMBEDDING].dtype,
            self.shape(EMBEDDING),
        ):
            return False
        one = np.frombuffer(first.raw(HEAD), np.uint8)
        other = np.frombuffer(second.raw(EMBEDDING), np.uint8)
        return all(
            np.array_equal(one[start : start + _COMPARE_BYTES], other[start : start + _COMPARE_BYTES])
            for start in range(0, len(one), _COMPARE_BYTES)
        )


def _refuse_quantized(config: dict[str, Any], where: Path) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
        raise _quantized_error(where, f"quantization_config names the method {method!r}")


def _quantized_error(where: Path, evidence: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: the checkpoint is quantized already ({evidence}); use the original one with weights in "
        f"{', '.join(_READABLE)}, or a GGUF file."
    )
