"""Rows of a growing cache: what a copy takes along, and what a merged decoder is told at the beginning of a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_graphs import portable_model, save
from onnx import TensorProto, helper, numpy_helper
from packages import ONE_THREAD, TOKENS, package_runner, small_model

from qwenonnx.errors import EngineError
from qwenonnx.package.package import Package
from qwenonnx.runtime.portable_runner import PortableRunner


def load(model: Any, folder: Path, slots: int = 1) -> PortableRunner:
    path = save(model, folder / "model.onnx")
    return PortableRunner(path, small_model()[0], ONE_THREAD, num_slots=slots, context_length=128)


def flagged(model: Any) -> None:
    """A merged decoder whose branch with a past gives NaN where there is none, and the other one where there is."""
    model.graph.input.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
    for name, value in (("nothing", np.array(0)), ("wrong", np.array(np.nan, np.float32)), ("axes", np.array([0]))):
        model.graph.initializer.append(numpy_helper.from_array(value, f"branch/{name}"))
    for node in model.graph.node:
        node.output[:] = ["logits/right" if name == "logits" else name for name in node.output]
    model.graph.node.extend(
        [
            helper.make_node("Shape", ["past_key_values.0.key"], ["branch/length"], start=2, end=3),
            helper.make_node("Squeeze", ["branch/length", "branch/axes"], ["branch/past"]),
            helper.make_node("Greater", ["branch/past", "branch/nothing"], ["branch/has_past"]),
            helper.make_node("Squeeze", ["use_cache_branch", "branch/axes"], ["branch/told"]),
            helper.make_node("Equal", ["branch/told", "branch/has_past"], ["branch/fits"]),
            helper.make_node("Where", ["branch/fits", "logits/right", "branch/wrong"], ["logits"]),
        ]
    )


def test_a_merged_decoder_is_told_whether_there_is_a_past(tiny_fp32: Package, tmp_path: Path) -> None:
    model = portable_model(tmp_path / "graph")
    flagged(model)
    runner = load(model, tmp_path / "graph")
    expected = package_runner(tiny_fp32).score(TOKENS, 0)

    first = runner.prefill(0, TOKENS[:5], 0).copy()
    second = runner.prefill(0, TOKENS[5:], 5).copy()
    again = runner.prefill(0, TOKENS[:5], 0)

    np.testing.assert_allclose(first, expected[4], atol=1e-4, rtol=0)
    np.testing.assert_allclose(second, expected[-1], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(again, first)


def test_a_copy_of_the_beginning_has_no_more_than_that(tmp_path: Path) -> None:
    runner = load(portable_model(tmp_path / "graph"), tmp_path / "graph", slots=2)
    expected = runner.prefill(0, [*TOKENS[:6], 9], 0).copy()
    runner.prefill(0, TOKENS, 0)

    runner.copy_row(0, 1, 6)

    with pytest.raises(EngineError, match=r"^the row holds 6 tokens, so nothing can be put at 12\.$"):
        runner.prefill(1, [9], 12)
    np.testing.assert_allclose(runner.prefill(1, [9], 6), expected, atol=1e-4, rtol=0)
