"""How `qwenonnx/runtime/probe.onnx` is made: `python tests/runtime_probe.py FILE`. A test holds the file to this."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

WIDTH = 64
LARGEST = 127


def probe_model() -> bytes:
    """One integer product `y = (x - 128) W` with W all 127, `[64, 16]`, in the operator that the int8 recipe uses."""
    initializers = [
        numpy_helper.from_array(np.full((WIDTH, 16), LARGEST, dtype=np.int8), "w"),
        numpy_helper.from_array(np.ones(16, dtype=np.float32), "w_scale"),
        numpy_helper.from_array(np.float32(1), "one"),
        numpy_helper.from_array(np.uint8(128), "zero_point"),
    ]
    node = helper.make_node(
        "MatMulIntegerToFloat", ["x", "w", "one", "w_scale", "zero_point"], ["y"], domain="com.microsoft"
    )
    graph = helper.make_graph(
        [node],
        "probe",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, ["rows", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 16])],
        initializers,
    )
    model = helper.make_model(
        graph,
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
    )
    data: bytes = model.SerializeToString(deterministic=True)
    return data


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(probe_model())
