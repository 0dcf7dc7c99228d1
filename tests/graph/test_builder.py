"""Writing a model and its data file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from packages import extents, small_model, write_graph

from qwenonnx.graph.builder import ALIGNMENT, GraphBuilder
from qwenonnx.package.package import Package


def builder(folder: Path) -> GraphBuilder:
    return GraphBuilder(folder / "model.onnx", folder / "model.onnx.data")


def test_the_data_file_holds_the_weights_and_hardly_anything_else(tmp_path: Path) -> None:
    config, weights = small_model(vocab_size=16_384)
    model_path = write_graph(tmp_path, config, weights)
    size = (tmp_path / "model.onnx.data").stat().st_size

    lengths = sum(length for _, length in extents(model_path))

    assert lengths / size >= 0.999


def test_weights_are_aligned_and_do_not_overlap(tiny_fp32: Package, tiny_int8: Package) -> None:
    for package in (tiny_fp32, tiny_int8):
        end = 0
        for offset, length in extents(package.model_path):
            assert offset % ALIGNMENT == 0
            assert end <= offset < end + ALIGNMENT
            end = offset + length
        assert end == package.data_paths[0].stat().st_size


def test_a_tied_matrix_is_stored_once(tmp_path: Path) -> None:
    config, weights = small_model()
    untied_config, untied_weights = small_model(tie_word_embeddings=False)
    write_graph(tmp_path / "tied", config, weights)
    write_graph(tmp_path / "untied", untied_config, untied_weights)

    sizes = {kind: (tmp_path / kind / "model.onnx.data").stat().st_size for kind in ("tied", "untied")}

    assert sizes["untied"] - sizes["tied"] == 4 * config.vocab_size * config.hidden_size


@pytest.mark.parametrize("array", [np.arange(6, dtype=np.float32).reshape(2, 3).T, np.zeros((0, 4)), np.int8(3)])
def test_arrays_of_any_layout_are_read_back(array: Any, tmp_path: Path) -> None:
    with builder(tmp_path) as g:
        g.weight("w", np.asarray(array))
        g.save("graph", {})

    (tensor,) = onnx.load(str(tmp_path / "model.onnx")).graph.initializer

    np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), array)


def test_names_are_given_once(tmp_path: Path) -> None:
    with builder(tmp_path) as g:
        g.weight("w", np.zeros(1, dtype=np.float32))
        g.node("Identity", ["w"], "n")

        with pytest.raises(ValueError, match="two weights are called 'w'"):
            g.weight("w", np.ones(1, dtype=np.float32))
        with pytest.raises(ValueError, match="two nodes are called 'n'"):
            g.node("Identity", ["w"], "n")


def test_a_constant_may_be_asked_for_again(tmp_path: Path) -> None:
    with builder(tmp_path) as g:
        assert g.constant("c", np.array([1])) == g.constant("c", np.array([1])) == "c"
        g.save("graph", {})

    assert len(onnx.load(str(tmp_path / "model.onnx")).graph.initializer) == 1


def test_a_data_file_is_never_appended_to(tmp_path: Path) -> None:
    (tmp_path / "model.onnx.data").write_bytes(b"old")

    with pytest.raises(FileExistsError):
        builder(tmp_path)


def test_an_alias_is_a_tensor_over_the_same_bytes(tmp_path: Path) -> None:
    with builder(tmp_path) as g:
        g.weight("pad", np.zeros(5, dtype=np.int8))
        g.weight("matrix", np.arange(12, dtype=np.float32).reshape(4, 3))
        g.alias("rows", of="matrix", shape=(2, 3), first_row=1)
        g.alias("cube", of="matrix", shape=(2, 3, 2))
        g.save("graph", {})

    loaded = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(str(tmp_path / "model.onnx")).graph.initializer}
    np.testing.assert_array_equal(loaded["rows"], [[3, 4, 5], [6, 7, 8]])
    np.testing.assert_array_equal(loaded["cube"], np.arange(12).reshape(2, 3, 2))
    assert (tmp_path / "model.onnx.data").stat().st_size == ALIGNMENT + 48


@pytest.mark.parametrize(("first_row", "shape"), [(3, (2, 3)), (-1, (1, 3)), (0, (5, 3))])
def test_an_alias_cannot_reach_beyond_the_weight(first_row: int, shape: tuple[int, int], tmp_path: Path) -> None:
    with builder(tmp_path) as g:
        g.weight("matrix", np.zeros((4, 3), dtype=np.float32))
        with pytest.raises(ValueError, match="has not the bytes"):
            g.alias("rows", of="matrix", shape=shape, first_row=first_row)
