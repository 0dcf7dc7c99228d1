"""What is read from the inputs and outputs of a graph that another program wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_graphs import Change, portable_model, renamed, save, without_past
from onnx import TensorProto, helper
from packages import ONE_THREAD, TOKENS, package_runner, small_model

from qwenonnx.errors import PackageError
from qwenonnx.package.package import Package
from qwenonnx.runtime.graph_io import GraphIo
from qwenonnx.runtime.portable_runner import PortableRunner
from qwenonnx.runtime.session import open_session

PARTS = [(layer, kind) for layer in (0, 1) for kind in ("key", "value")]


def changed_graph(folder: Path, *changes: Change) -> Path:
    """Writes the portable graph with changes, weights inside."""
    model = portable_model(folder)
    for change in changes:
        change(model)
    return save(model, folder / "model.onnx")


def read(folder: Path, *changes: Change) -> GraphIo:
    path = changed_graph(folder, *changes)
    return GraphIo.of(open_session(path, ONE_THREAD), small_model()[0], path)


def named(pattern: str) -> Change:
    """Calls the cache inputs as `pattern` says, with `layer` and `kind` put in."""
    names = {f"past_key_values.{layer}.{kind}": pattern.format(layer=layer, kind=kind) for layer, kind in PARTS}
    return renamed(lambda name: names.get(name, name))


def backwards(model: Any) -> None:
    """Declares inputs and outputs in the opposite order."""
    for values in (model.graph.input, model.graph.output):
        reordered = [*values][::-1]
        del values[:]
        values.extend(reordered)


def without_any_past(model: Any) -> None:
    """The graph of the task text-generation, which begins anew with each call."""
    for layer, kind in PARTS:
        without_past(f"past_key_values.{layer}.{kind}")(model)


def without_one_present(model: Any) -> None:
    """One cache tensor is not given back."""
    model.graph.output.remove(next(value for value in model.graph.output if value.name == "present.0.value"))


def with_hidden_states(model: Any) -> None:
    """One more output, whose name looks a little like a layer's."""
    model.graph.output.append(helper.make_tensor_value_info("hidden_states.0", TensorProto.FLOAT, None))
    model.graph.node.append(helper.make_node("Identity", ["/model/embed_tokens/Gather"], ["hidden_states.0"]))


def with_double_cache(model: Any) -> None:
    """Keys and values come in fp64."""
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
            for node in model.graph.node:
                node.input[:] = [f"{value.name}/fp32" if name == value.name else name for name in node.input]
            node = helper.make_node("Cast", [value.name], [f"{value.name}/fp32"], to=TensorProto.FLOAT)
            model.graph.node.insert(0, node)


def test_types_and_sizes_are_those_of_the_graph(tmp_path: Path) -> None:
    io = read(tmp_path / "graph")

    assert io.ids_type is np.int64
    assert io.cache_type is np.float32
    assert io.cache_shape == (2, 16)
    assert io.helpers == {"attention_mask": np.int64, "position_ids": np.int64}


def test_the_cache_is_paired_by_name_whatever_the_order(tiny_fp32: Package, tmp_path: Path) -> None:
    io = read(tmp_path / "read", backwards)
    path = changed_graph(tmp_path / "run", backwards)
    runner = PortableRunner(path, small_model()[0], ONE_THREAD, context_length=128)

    steps = np.stack([runner.decode([token], [at])[0] for at, token in enumerate(TOKENS)])

    assert io.past == tuple(f"past_key_values.{layer}.{kind}" for layer, kind in PARTS)
    assert io.present == tuple(f"present.{layer}.{kind}" for layer, kind in PARTS)
    np.testing.assert_allclose(steps, package_runner(tiny_fp32).score(TOKENS, 0), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "pattern",
    [
        "past.{layer}.{kind}",
        "past_{kind}_values.{layer}.{kind}",
        "past_key_values_{layer}_{kind}",
        "past_key_values/{layer}/{kind}s",
        "past::{layer}::{kind}",
        "past_key_values.{layer}.self_attn.{kind}",
    ],
)
def test_odd_names_of_the_cache_are_understood(pattern: str, tmp_path: Path) -> None:
    io = read(tmp_path / "graph", named(pattern))

    assert io.past == tuple(pattern.format(layer=layer, kind=kind) for layer, kind in PARTS)


def test_other_outputs_are_not_taken_for_the_cache(tmp_path: Path) -> None:
    io = read(tmp_path / "graph", with_hidden_states)

    assert io.present == tuple(f"present.{layer}.{kind}" for layer, kind in PARTS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            without_any_past,
            "no input for the keys of layer 0; export it with its past, as the task text-generation-with",
        ),
        (without_one_present, "the graph has no output for the values of layer 0."),
        (with_double_cache, "is of the type tensor(double), which cannot be used here."),
    ],
)
def test_a_cache_that_cannot_be_carried_on_is_refused(
    change: Callable[[Any], None], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(PackageError) as caught:
        read(tmp_path / "graph", change)

    assert reason in str(caught.value)
