"""Packages, graphs and runners of small models, as the tests of several folders need them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from tiny import tiny_config, tiny_weights

from qwenonnx.checkpoint.open import open_checkpoint
from qwenonnx.config import ModelConfig
from qwenonnx.export.exporter import export_checkpoint
from qwenonnx.files import Progress
from qwenonnx.graph.builder import GraphBuilder
from qwenonnx.graph.decoder import write_decoder
from qwenonnx.graph.linear import FloatLinears, LinearStyle
from qwenonnx.graph.weights import Weights
from qwenonnx.package.manifest import DATA_NAME, MODEL_NAME
from qwenonnx.package.package import Package
from qwenonnx.quantize.quantizer import quantize_package
from qwenonnx.runtime.fused_runner import FusedRunner
from qwenonnx.runtime.load import PackageRunner, load_runner
from qwenonnx.runtime.session import SessionConfig

ONE_THREAD = SessionConfig(threads=1)
TOKENS = (5, 301, 77, 12, 12, 380, 0, 250, 199, 64, 3, 150)
"""Twelve arbitrary ids of the tiny model."""


class ArrayWeights:
    """Weights held in memory."""

    def __init__(self, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        self.tensors = dict(tensors)

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self.tensors[name]


def small_model(**overrides: Any) -> tuple[ModelConfig, ArrayWeights]:
    """Configuration and random weights of the tiny model, with some fields of its config.json replaced."""
    config = tiny_config(**overrides)
    return ModelConfig.from_hf(config, "config.json"), ArrayWeights(tiny_weights(0, config))


def write_graph(folder: Path, config: ModelConfig, weights: Weights, style: LinearStyle | None = None) -> Path:
    """Writes only the graph and its data; returns the model's path."""
    folder.mkdir(parents=True, exist_ok=True)
    with GraphBuilder(folder / MODEL_NAME, folder / DATA_NAME) as g:
        write_decoder(g, config, weights, style or FloatLinears())
        g.save("qwen2", {})
    return folder / MODEL_NAME


def graph_runner(model_path: Path, config: ModelConfig, *, slots: int = 1, context: int = 128) -> FusedRunner:
    """Loads a graph that is no package."""
    return FusedRunner(model_path, config, ONE_THREAD, num_slots=slots, context_length=context)


def package_runner(package: Package, *, slots: int = 1, context: int = 128) -> PackageRunner:
    """Loads a package."""
    return load_runner(package, ONE_THREAD, num_slots=slots, context_length=context)


def no_progress(label: str) -> Progress:
    """Takes stages and their progress, and says nothing."""
    return lambda done, total: None


def export_folder(checkpoint: Path, target: Path) -> Package:
    """Exports a checkpoint as the model `tiny`."""
    return export_checkpoint(open_checkpoint(checkpoint), target, model="tiny", stage=no_progress)


def quantize(source: Package, target: Path, recipe: str = "int8") -> Package:
    """Quantizes a package."""
    return quantize_package(source, target, recipe, stage=no_progress)


def names(folder: Path) -> list[str]:
    """What lies in a folder, hidden things included, sorted."""
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, hidden ones included."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def extents(model_path: Path) -> list[tuple[int, int]]:
    """Where a model's tensors lie in its data file: (offset, length), in order, without parts of other tensors."""
    found = set()
    for tensor in onnx.load(str(model_path), load_external_data=False).graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries["location"] == "model.onnx.data"
            found.add((int(entries["offset"]), int(entries["length"])))
    whole: list[tuple[int, int]] = []
    for offset, length in sorted(found, key=lambda extent: (extent[0], -extent[1])):
        if not whole or offset + length > sum(whole[-1]):
            whole.append((offset, length))
    return whole
