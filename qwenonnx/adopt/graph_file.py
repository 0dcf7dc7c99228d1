"""What a graph's file tells: where its weights are, how they are stored, and how it has to be run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from qwenonnx.errors import PackageError
from qwenonnx.graph.stored_graph import load_graph
from qwenonnx.package.manifest import is_inside

_INTEGER_PRODUCTS = ("MatMulInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QLinearMatMul", "QGemm")
_FOUR_BITS = "MatMulBnb4"
_BLOCKS = "MatMulNBits"
_FUSED_ATTENTION = "GroupQueryAttention"
_LFS_POINTER = b"version https://git-lfs"
# Inputs of the graph that this program writes itself.
_OWN_INPUTS = frozenset({"seqlens_k", "logits_rows"})


@dataclass(frozen=True, slots=True)
class GraphFile:
    """A graph as its file describes it; `graph` and `recipe` are as in a manifest.

    Attention as one operator that appends to its cache (`GroupQueryAttention`) can share past and present, so it is run
    as `genai`; everything else is `portable`. `data_files` are names below the package's folder.
    """

    graph: str
    recipe: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    data_files: tuple[str, ...]
    producer: str
    producer_version: str

    @classmethod
    def read(cls, folder: Path, name: str) -> GraphFile:
        """Reads the graph `name` of a folder; weights in other files are not read.

        Raises:
            PackageError: it is no ONNX file, or its weights lie in files that are missing or outside its folder.
        """
        path = folder / name
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise PackageError(
                    f"{path}: this is only a pointer of Git LFS to the file; fetch it with `git lfs pull`."
                )
        model = load_graph(path)
        inputs = tuple(value.name for value in model.graph.input)
        if _OWN_INPUTS.issubset(inputs):
            raise PackageError(
                f"{path}: qwenonnx has written this graph itself, and its manifest is missing; export or quantize the "
                "package again."
            )
        graphs = list(_graphs(model))
        nodes = [node for graph in graphs for node in graph.node]
        tensors = [tensor for graph in graphs for tensor in _tensors(graph)]
        attention = any(node.op_type == _FUSED_ATTENTION for node in nodes)
        return cls(
            graph="genai" if attention else "portable",
            recipe=_recipe(nodes, tensors),
            inputs=inputs,
            outputs=tuple(value.name for value in model.graph.output),
            data_files=_data_files(folder, name, tensors),
            producer=model.producer_name,
            producer_version=model.producer_version,
        )


def _graphs(model: Any) -> Iterator[Any]:
    """The graph, those inside its nodes (the branches of a merged decoder), and the bodies of functions."""
    waiting = [model.graph, *model.functions]
    while waiting:
        graph = waiting.pop()
        yield graph
        for node in graph.node:
            for attribute in node.attribute:
                waiting.extend([attribute.g] if attribute.HasField("g") else attribute.graphs)


def _tensors(graph: Any) -> Iterator[Any]:
    yield from getattr(graph, "initializer", ())
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t


def _data_files(folder: Path, name: str, tensors: Sequence[Any]) -> tuple[str, ...]:
    """Files of external tensors, by names below the folder.

    Raises:
        PackageError: one leads out of the graph's folder, where onnxruntime does not read, or is missing.
    """
    below = PurePosixPath(name).parent
    entries = (entry for tensor in tensors for entry in tensor.external_data if entry.key == "location")
    locations = {str(PurePosixPath(entry.value)) for entry in entries}
    for location in sorted(locations):
        if not is_inside(location):
            raise PackageError(
                f"{folder / name}: its weights are in {location!r}, outside the graph's folder, where nothing is read; "
                "put the file beside the graph and save the graph with its plain name."
            )
        if not (folder / below / location).is_file():
            raise PackageError(f"{folder / below / location}: the graph's weights are missing; download them too.")
    return tuple(str(below / location) for location in sorted(locations))


def _recipe(nodes: Sequence[Any], tensors: Sequence[Any]) -> str:
    """How most of the linears are stored, told by the operators, or else by the type of most of the weights."""
    operators = Counter(node.op_type for node in nodes)
    bits = Counter(_bits(node) for node in nodes if node.op_type == _BLOCKS)
    stored = Counter({f"int{width} ({_BLOCKS})": count for width, count in bits.items()})
    stored.update({f"int8 ({name})": operators[name] for name in _INTEGER_PRODUCTS if operators[name]})
    if operators[_FOUR_BITS]:
        stored[f"4 bits ({_FOUR_BITS})"] += operators[_FOUR_BITS]
    sizes: Counter[int] = Counter()
    for tensor in tensors:
        sizes[tensor.data_type] += _elements(tensor)
    kind = _TYPES.get(sizes.most_common(1)[0][0], "unknown") if sizes else "unknown"
    if not stored and kind.startswith(("int", "uint")) and operators["DequantizeLinear"]:
        return f"{kind} (DequantizeLinear)"
    return stored.most_common(1)[0][0] if stored else kind


# By the numbers of onnx.TensorProto.DataType.
_TYPES = {1: "fp32", 2: "uint8", 3: "int8", 10: "fp16", 16: "bf16", 21: "uint4", 22: "int4"}


def _bits(node: Any) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "bits"), 4)


def _elements(tensor: Any) -> int:
    count = 1
    for size in tensor.dims:
        count *= size
    return count
