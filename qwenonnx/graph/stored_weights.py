"""Reading an fp32 package back as checkpoint tensors, memory-mapped."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from qwenonnx.config import ModelConfig
from qwenonnx.errors import PackageError
from qwenonnx.graph.stored_graph import load_graph


class StoredWeights:
    """The tensors of a fused fp32 graph under the checkpoint's names and in its layout.

    Raises:
        PackageError: the file is no ONNX model, or a tensor is missing or lies outside the data file.
    """

    def __init__(self, model_path: Path, config: ModelConfig) -> None:
        self._path = model_path
        self._config = config
        self._initializers = {tensor.name: tensor for tensor in load_graph(model_path).graph.initializer}

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor; linears are `[out_features, in_features]` and may be views of the file."""
        match = re.fullmatch(r"(.+\.self_attn)\.([qkv])_proj\.(weight|bias)", name)
        if match:
            stem, kind, leaf = match.groups()
            q, kv = self._config.q_size, self._config.kv_size
            columns = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, None)}[kind]
            packed = self._read(f"{stem}.qkv_proj.{leaf}")
            return packed[columns] if leaf == "bias" else packed[:, columns].T
        value = self._read(name)
        return value.T if re.search(r"\.(o|gate|up|down)_proj\.weight$", name) else value

    def _read(self, name: str) -> NDArray[np.float32]:
        tensor = self._initializers.get(name)
        if tensor is None:
            raise PackageError(f"{self._path}: there is no tensor {name!r} in it; export the package again.")
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return np.asarray(onnx.numpy_helper.to_array(tensor), dtype=np.float32)
        entries = {entry.key: entry.value for entry in tensor.external_data}
        path = self._path.parent / entries["location"]
        shape = tuple(tensor.dims)
        offset = int(entries.get("offset", 0))
        if path.parent != self._path.parent or offset + 4 * int(np.prod(shape)) > path.stat().st_size:
            raise PackageError(f"{path}: the bytes of {name!r} are not in it; export the package again.")
        return np.memmap(path, dtype=np.float32, mode="r", offset=offset, shape=shape)
