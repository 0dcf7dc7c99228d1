"""An fp32 package read back under the checkpoint's names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from packages import small_model, write_graph

from qwenonnx.errors import PackageError
from qwenonnx.graph.stored_weights import StoredWeights


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_comes_back_as_it_went_in(tied: bool, tmp_path: Path) -> None:
    config, weights = small_model(tie_word_embeddings=tied)
    stored = StoredWeights(write_graph(tmp_path, config, weights), config)

    for name, expected in weights.tensors.items():
        np.testing.assert_array_equal(stored.tensor(name), expected, err_msg=name)


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    config, weights = small_model()
    stored = StoredWeights(write_graph(tmp_path, config, weights), config)

    with pytest.raises(PackageError, match=r"model\.onnx: there is no tensor 'lm_head\.weight'"):
        stored.tensor("lm_head.weight")


def test_a_data_file_that_is_too_short_is_named(tmp_path: Path) -> None:
    config, weights = small_model()
    model_path = write_graph(tmp_path, config, weights)
    data = tmp_path / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-4])

    with pytest.raises(PackageError, match=r"model\.onnx\.data: the bytes of 'model\.norm\.weight' are not in it"):
        StoredWeights(model_path, config).tensor("model.norm.weight")


@pytest.mark.parametrize("location", ["../../etc/passwd", "/etc/passwd", "sub/model.onnx.data"])
def test_data_outside_of_the_package_is_refused(location: str, tmp_path: Path) -> None:
    config, weights = small_model()
    model_path = write_graph(tmp_path, config, weights)
    model = onnx.load(str(model_path), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    model_path.write_bytes(model.SerializeToString())

    with pytest.raises(PackageError, match="are not in it"):
        StoredWeights(model_path, config).tensor("model.norm.weight")
