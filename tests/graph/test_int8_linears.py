"""INT8 linears: exact integer sums, one scale per token, nothing big left in fp32."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray
from onnx import TensorProto, helper
from packages import ArrayWeights, small_model, write_graph

from qwenonnx.graph.builder import IR_VERSION, OPSET, GraphBuilder
from qwenonnx.graph.int8 import HEAD_PIECES, SMALLEST_SCALE, Int8Linears, quantize_rows
from qwenonnx.graph.rows import LOGITS_ROWS
from qwenonnx.package.package import Package
from qwenonnx.runtime.cpu import cpu_info

needs_exact_products = pytest.mark.skipif(
    not cpu_info().has_int8_dot, reason="this CPU sums u8 x s8 products in 16 bits, which saturate"
)


@given(
    arrays(
        np.float32,
        array_shapes(min_dims=2, max_dims=2, max_side=12),
        elements=st.floats(-1e6, 1e6, width=32).map(lambda x: 0.0 if abs(x) < 1e-20 else x),
    )
)
def test_quantizing_a_row_errs_by_at_most_half_a_step(weight: NDArray[np.float32]) -> None:
    values, scale = quantize_rows(weight)

    assert values.dtype == np.int8
    assert np.abs(values.astype(int)).max() <= 127
    error = np.abs(values * scale[:, None].astype(np.float64) - weight)
    assert (error <= scale[:, None] * (0.5 + 1e-4)).all()


def test_each_row_has_a_scale_of_its_own() -> None:
    weight = np.array([[1e-3, -1e-3], [1000, 500]], dtype=np.float32)

    values, scale = quantize_rows(weight)

    np.testing.assert_array_equal(values, [[127, -127], [127, 64]])
    np.testing.assert_allclose(scale, weight.max(axis=1) / 127)


def test_a_row_of_zeros_stays_zero() -> None:
    values, scale = quantize_rows(np.zeros((2, 3), dtype=np.float32))

    assert not values.any()
    assert (scale == np.float32(SMALLEST_SCALE)).all()


@needs_exact_products
@pytest.mark.parametrize("operator", ["MatMulIntegerToFloat", "QGemm"])
@pytest.mark.parametrize("zero_point", [0, 128])
def test_integer_sums_are_exact_at_the_extremes(operator: str, zero_point: int) -> None:
    for k in range(2, 65):
        for rows in (1, 5):
            a = np.full((rows, k), 255, dtype=np.uint8)
            b = np.full((k, 16), 127, dtype=np.int8)
            b[:, 1] = -127

            result = integer_product(operator, a, b, zero_point)

            expected = (a.astype(np.int64) - zero_point) @ b.astype(np.int64)
            np.testing.assert_array_equal(result, expected, err_msg=f"K = {k}, {rows} rows")


@needs_exact_products
def test_a_linear_computes_each_row_as_if_it_were_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    run = int8_linear(tmp_path, rng.standard_normal((48, 64)).astype(np.float32))
    x = rng.standard_normal((33, 64)).astype(np.float32) * np.logspace(-3, 3, 33, dtype=np.float32)[:, None]

    together = run(x)

    for i in range(len(x)):
        np.testing.assert_array_equal(together[i], run(x[i : i + 1])[0])
    np.testing.assert_array_equal(together[10:20], run(x[10:20]))


@needs_exact_products
def test_a_linear_is_as_exact_as_its_two_quantizations(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((48, 64)).astype(np.float32)
    x = rng.standard_normal((7, 64)).astype(np.float32)
    values, scale = quantize_rows(weight)
    step = np.abs(x).max(axis=1, keepdims=True) / 127

    result = int8_linear(tmp_path, weight)(x)

    expected = (np.rint(x / step) @ values.T.astype(np.float64)) * step * scale
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_a_row_of_zeros_gives_zeros(tmp_path: Path) -> None:
    run = int8_linear(tmp_path, np.ones((8, 16), dtype=np.float32))

    np.testing.assert_array_equal(run(np.zeros((2, 16), dtype=np.float32)), np.zeros((2, 8)))


def test_all_linears_are_quantized_and_no_big_matrix_is_left_in_fp32(tiny_int8: Package) -> None:
    graph = onnx.load(str(tiny_int8.model_path), load_external_data=False).graph
    operators = Counter(node.op_type for node in graph.node)
    config = tiny_int8.config

    # qkv, o, gate, up, down
    assert operators["MatMulIntegerToFloat"] == 5 * config.num_layers
    assert operators["QGemm"] == HEAD_PIECES
    assert operators["MatMul"] == config.num_layers + 1  # the rotations before down_proj and before the head
    assert operators["Gemm"] == 0
    large = {t.name for t in graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims) > 1}
    assert large == {"cos_cache", "sin_cache", "head_transform", "down_rotation"}


def test_an_untied_int8_head_is_a_matrix_of_its_own(tmp_path: Path) -> None:
    config, weights = small_model(tie_word_embeddings=False)
    path = write_graph(tmp_path, config, weights, Int8Linears())

    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(str(path)).graph.initializer}

    np.testing.assert_array_equal(stored["lm_head.weight"], quantize_rows(weights.tensor("lm_head.weight"))[0])
    np.testing.assert_array_equal(
        stored["model.embed_tokens.weight"], quantize_rows(weights.tensor("model.embed_tokens.weight"))[0]
    )


class Linear:
    """A model of one int8 linear."""

    def __init__(self, path: Path) -> None:
        import onnxruntime as ort

        self._session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def __call__(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.asarray(self._session.run(["out"], {"x": x, LOGITS_ROWS.name: np.zeros(len(x), dtype=np.int64)})[0])


def int8_linear(folder: Path, weight: NDArray[np.float32]) -> Linear:
    config, weights = small_model()
    style = Int8Linears()
    with GraphBuilder(folder / "model.onnx", folder / "model.onnx.data") as g:
        g.input("x", np.float32, ("rows", weight.shape[1]))
        g.input(LOGITS_ROWS.name, np.int64, ("rows",))
        g.output("out", np.float32, ("rows", weight.shape[0]))
        style.begin(g, weights, config)
        operand = style.operand(g, "x", "input", width=weight.shape[1], rows=LOGITS_ROWS)
        product = style.linear(g, operand, ["w"], ArrayWeights({"w": weight}), "linear")
        g.node("Identity", [style.scaled(g, product, "linear")], "out")
        g.save("linear", {})
    return Linear(folder / "model.onnx")


def integer_product(operator: str, a: NDArray[np.uint8], b: NDArray[np.int8], zero_point: int) -> NDArray[np.float32]:
    import onnxruntime as ort

    one = np.array(1, dtype=np.float32)
    zero = np.array(zero_point, dtype=np.uint8)
    columns = np.ones(b.shape[1], dtype=np.float32)
    if operator == "QGemm":
        constants = {"one": one, "zero": zero, "b": b.T.copy(), "scale": columns, "b_zero": columns.astype(np.int8) * 0}
        inputs, attributes = ["a", "one", "zero", "b", "scale", "b_zero"], {"transB": 1}
    else:
        constants = {"b": b, "one": one, "scale": columns, "zero": zero}
        inputs, attributes = ["a", "b", "one", "scale", "zero"], {}
    node = helper.make_node(operator, inputs, ["y"], domain="com.microsoft", **attributes)
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, list(a.shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [len(a), b.shape[1]])],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"a": a})[0])
