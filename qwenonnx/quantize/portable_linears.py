"""The linears of a graph that another program wrote: which of its nodes can be quantized, and what they are called."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from qwenonnx.errors import PackageError, QuantizeError
from qwenonnx.graph.stored_graph import load_graph
from qwenonnx.package.manifest import is_inside
from qwenonnx.quantize.exclusion import Linear

OPERATORS = ("MatMul", "Gemm")
_FLOAT = onnx.TensorProto.FLOAT
_HALVES = {onnx.TensorProto.FLOAT16: "fp16", onnx.TensorProto.BFLOAT16: "bf16"}


@dataclass(frozen=True, slots=True)
class PortableGraph:
    """A graph without its weights, whose nodes all have names, and those of its nodes that are linears."""

    model: Any
    linears: tuple[Linear, ...]

    @classmethod
    def read(cls, path: Path) -> PortableGraph:
        """Reads a graph.

        Raises:
            PackageError: the file is no ONNX model, or has weights outside its folder.
            QuantizeError: it has no linears with fp32 weights.
        """
        model = load_graph(path)
        _name_nodes(model.graph)
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        linears, halves = [], set()
        for node in model.graph.node:
            if node.op_type not in OPERATORS or node.domain not in ("", "ai.onnx") or node.input[1] not in stored:
                continue
            weight = stored[node.input[1]]
            if weight.data_type in _HALVES:
                halves.add(_HALVES[weight.data_type])
            elif weight.data_type == _FLOAT and len(weight.dims) == 2:
                linears.append(Linear(node.name, _aliases(node.name), math.prod(weight.dims)))
        if halves:
            raise QuantizeError(
                f"{path}: its weights are {' and '.join(sorted(halves))}, and this recipe needs fp32; use an fp32 "
                "graph of the same model."
            )
        if not linears:
            raise QuantizeError(
                f"{path}: there is no MatMul or Gemm with fp32 weights in it, so nothing can be quantized; it may be "
                "quantized already."
            )
        graph = cls(model, tuple(linears))
        if outside := [name for name in graph.data_files if not is_inside(name)]:
            raise PackageError(
                f"{path}: it has weights in {outside[0]}, outside its folder; put them beside the graph."
            )
        return graph

    @property
    def data_files(self) -> list[str]:
        """The files that hold weights, relative to the graph's folder."""
        tensors = self.model.graph.initializer
        return sorted({entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"})

    def other_products(self) -> list[str]:
        """Names of the nodes that multiply, but not with weights, as attention does."""
        names = {linear.name for linear in self.linears}
        return [node.name for node in self.model.graph.node if node.op_type in OPERATORS and node.name not in names]


def fp32_linears(model: Any) -> list[str]:
    """Names of the nodes that multiply with a stored fp32 matrix."""
    matrices = {t.name for t in model.graph.initializer if t.data_type == _FLOAT and len(t.dims) == 2}
    return [node.name for node in model.graph.node if node.op_type in OPERATORS and node.input[1] in matrices]


def _name_nodes(graph: Any) -> None:
    """Gives each node that has no name, or another's, one of its own: the quantizer knows nodes by their names."""
    used: set[str] = set()
    for i, node in enumerate(graph.node):
        if not node.name or node.name in used:
            node.name = f"{node.name or node.op_type}_{i}"
        used.add(node.name)


def _aliases(name: str) -> tuple[str, ...]:
    """Of `/model/layers.0/mlp/down_proj/MatMul`: `model.layers.0.mlp.down_proj`, as a checkpoint calls it."""
    parts = [part for part in name.split("/") if part]
    if len(parts) > 1 and parts[-1].startswith(OPERATORS):
        parts.pop()
    alias = ".".join(parts)
    return () if alias == name else (alias,)
