"""Writing an ONNX model node by node, with weights streamed to an external data file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

# Loaded by onnxruntime 1.32+; 21 has the QuantizeLinear that the int8 recipe uses.
OPSET = 21
IR_VERSION = 10
ALIGNMENT = 64

Dim = int | str


class Subgraph:
    """A branch of an `If` node; `graph` is complete once the builder's `subgraph` block ends."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.results: list[Any] = []

    def outputs(self, dtype: type[np.generic], names: Sequence[str]) -> None:
        """Declares the branch's results, in the order of the `If` node's outputs."""
        element = _onnx_type(np.dtype(dtype))
        self.results = [helper.make_tensor_value_info(name, element, None) for name in names]


class GraphBuilder:
    """Collects nodes, inputs, outputs and weights of one model; a context manager that owns the data file.

    Values are known by their names (plain strings). Large arrays go to the data file as they come, so memory stays
    bounded by the largest of them; small ones stay inside the model file.
    """

    def __init__(self, model_path: Path, data_path: Path) -> None:
        self._model_path = model_path
        self._data_name = data_path.name
        self._data = data_path.open("xb")
        self._offset = 0
        self._nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._names: set[str] = set()

    def __enter__(self) -> GraphBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()

    def input(self, name: str, dtype: type[np.generic], shape: Sequence[Dim]) -> str:
        """Declares a graph input."""
        self._inputs.append(helper.make_tensor_value_info(name, _onnx_type(np.dtype(dtype)), list(shape)))
        return name

    def output(self, name: str, dtype: type[np.generic], shape: Sequence[Dim]) -> str:
        """Declares a graph output."""
        self._outputs.append(helper.make_tensor_value_info(name, _onnx_type(np.dtype(dtype)), list(shape)))
        return name

    def node(
        self,
        op: str,
        inputs: Sequence[str],
        name: str,
        *,
        outputs: Sequence[str] | None = None,
        domain: str = "",
        attributes: Mapping[str, Any] | None = None,
    ) -> str:
        """Appends a node; returns its first output, which is called like the node unless `outputs` says else."""
        if name in self._names:
            raise ValueError(f"two nodes are called {name!r}")
        self._names.add(name)
        results = [name] if outputs is None else list(outputs)
        self._nodes.append(
            helper.make_node(op, list(inputs), results, name=name, domain=domain, **dict(attributes or {}))
        )
        return results[0]

    @contextmanager
    def subgraph(self, name: str) -> Iterator[Subgraph]:
        """Collects the nodes of the block in a graph of their own, which sees all values made before."""
        outer, self._nodes = self._nodes, []
        branch = Subgraph()
        try:
            yield branch
            branch.graph = helper.make_graph(self._nodes, name, [], branch.results)
        finally:
            self._nodes = outer

    def constant(self, name: str, value: NDArray[Any]) -> str:
        """Adds a small tensor to the model file; adding the same name again returns the first one."""
        if name not in self._initializers:
            tensor = TensorProto(
                name=name, data_type=_onnx_type(value.dtype), dims=value.shape, raw_data=value.tobytes()
            )
            self._initializers[name] = tensor
        return name

    def weight(self, name: str, value: NDArray[Any]) -> str:
        """Adds a tensor whose bytes go to the data file at once."""
        if name in self._initializers:
            raise ValueError(f"two weights are called {name!r}")
        self._write(b"\0" * (-self._offset % ALIGNMENT))
        offset = self._offset
        self._write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        self._initializers[name] = self._external(name, value.dtype, value.shape, offset, value.nbytes)
        return name

    def alias(self, name: str, of: str, shape: Sequence[int], *, first_row: int = 0) -> str:
        """Adds a second tensor over bytes of the weight `of`, from its row `first_row` on, in another shape."""
        original = self._initializers[of]
        entries = {entry.key: int(entry.value) for entry in original.external_data if entry.key != "location"}
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(original.data_type))
        begin = entries["length"] // original.dims[0] * first_row
        length = int(np.prod(shape)) * dtype.itemsize
        if first_row < 0 or begin + length > entries["length"]:
            raise ValueError(f"{of!r} has not the bytes for {tuple(shape)} from row {first_row} on")
        self._initializers[name] = self._external(name, dtype, shape, entries["offset"] + begin, length)
        return name

    def save(self, graph_name: str, metadata: Mapping[str, str]) -> None:
        """Writes the model file. The data file is complete after this."""
        self._data.flush()
        graph = helper.make_graph(
            self._nodes, graph_name, self._inputs, self._outputs, list(self._initializers.values())
        )
        model = helper.make_model(
            graph,
            producer_name="qwenonnx",
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)],
        )
        for key, value in sorted(metadata.items()):
            model.metadata_props.add(key=key, value=value)
        self._model_path.write_bytes(model.SerializeToString(deterministic=True))

    def _write(self, data: bytes | memoryview) -> None:
        self._data.write(data)
        self._offset += len(data)

    def _external(
        self, name: str, dtype: np.dtype[Any], shape: Sequence[int], offset: int, length: int
    ) -> onnx.TensorProto:
        tensor = TensorProto(name=name, data_type=_onnx_type(dtype), dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", self._data_name), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        return tensor


def _onnx_type(dtype: np.dtype[Any]) -> int:
    return int(helper.np_dtype_to_tensor_dtype(dtype))
