"""A graph that is right on a whole text and wrong through its KV cache is not adopted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_graphs import copy_texts, portable_model, save
from onnx import TensorProto, helper, numpy_helper
from packages import contents, no_progress

from qwenonnx.adopt.adopter import adopt_folder
from qwenonnx.errors import PackageError
from qwenonnx.package.package import Package


def anchored_at_the_start(model: Any) -> None:
    """Positions count from the step's first token on, so that with a past a new token sees only the first keys."""
    declared = next(value for value in model.graph.input if value.name == "position_ids")
    model.graph.input.remove(declared)
    for name, value in (("zero", 0), ("one", 1), ("axis", [0])):
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype=np.int64), f"start/{name}"))
    nodes = [
        helper.make_node("Shape", ["input_ids"], ["start/shape"], start=1),
        helper.make_node("Squeeze", ["start/shape", "start/axis"], ["start/length"]),
        helper.make_node("Range", ["start/zero", "start/length", "start/one"], ["start/row"]),
        helper.make_node("Unsqueeze", ["start/row", "start/axis"], ["position_ids"]),
    ]
    for node in reversed(nodes):
        model.graph.node.insert(0, node)


def forgetful(model: Any) -> None:
    """The values of layer 1 are given back as zeros."""
    name = "present.1.value"
    for node in model.graph.node:
        node.input[:] = [f"{name}/kept" if value == name else value for value in node.input]
        node.output[:] = [f"{name}/kept" if value == name else value for value in node.output]
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, dtype=np.float32), "forget"))
    model.graph.node.append(helper.make_node("Mul", [f"{name}/kept", "forget"], [name]))
    assert model.graph.initializer[-1].data_type == TensorProto.FLOAT


@pytest.mark.parametrize("change", [anchored_at_the_start, forgetful])
def test_a_graph_with_a_wrong_cache_is_refused_and_nothing_written(
    change: Any, tiny_fp32: Package, tmp_path: Path
) -> None:
    folder = tmp_path / "export"
    model = portable_model(folder)
    change(model)
    save(model, folder / "model.onnx")
    copy_texts(tiny_fp32, folder)
    before = contents(folder)

    with pytest.raises(PackageError, match=r"other logits through the KV cache than at once .* the cache is wrong"):
        adopt_folder(folder, stage=no_progress)

    assert contents(folder) == before
