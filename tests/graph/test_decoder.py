"""The fused graph computes what Qwen2 is, whatever way a text is fed to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from packages import TOKENS, ArrayWeights, graph_runner, package_runner, small_model, write_graph

from qwenonnx.export.reference import reference_logits
from qwenonnx.graph.names import past_names, present_names
from qwenonnx.package.package import Package
from qwenonnx.runtime.attention_inputs import attention_inputs
from qwenonnx.runtime.load import PackageRunner

TOLERANCE = 1e-4
# Shapes in which the parts of the graph could be mixed up without notice: as many key as query heads, one key
# head for all, and a head size that is not hidden / heads.
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
    {"head_dim": 32},
    {"tie_word_embeddings": False},
    {"num_hidden_layers": 1},
    {"rms_norm_eps": 1e-2, "rope_theta": 1e6},
)


def in_chunks(runner: PackageRunner, sizes: Sequence[int]) -> NDArray[np.float32]:
    """Logits of `TOKENS` fed in chunks of the given sizes."""
    assert sum(sizes) == len(TOKENS)
    parts, start = [], 0
    for size in sizes:
        parts.append(runner.score(TOKENS[start : start + size], start))
        start += size
    return np.concatenate(parts)


@pytest.mark.parametrize("overrides", SHAPES, ids=str)
def test_logits_equal_the_numpy_reference(overrides: dict[str, Any], tmp_path: Path) -> None:
    config, weights = small_model(**overrides)
    runner = graph_runner(write_graph(tmp_path, config, weights), config)

    logits = runner.score(TOKENS, 0)

    expected = reference_logits(config, weights, TOKENS)
    assert logits.shape == (len(TOKENS), config.vocab_size)
    np.testing.assert_array_equal(logits.argmax(axis=1), expected.argmax(axis=1))
    assert np.abs(logits - expected).max() < TOLERANCE


@pytest.mark.parametrize("sizes", [(1,) * 12, (5, 7), (5, 1, 6), (1, 11)], ids=str)
def test_a_text_in_chunks_gives_the_logits_of_the_whole(sizes: Sequence[int], tiny_fp32: Package) -> None:
    runner = package_runner(tiny_fp32)
    whole = runner.score(TOKENS, 0)

    chunked = in_chunks(runner, sizes)

    np.testing.assert_array_equal(chunked.argmax(axis=1), whole.argmax(axis=1))
    assert np.abs(chunked - whole).max() < TOLERANCE


@pytest.mark.parametrize(("past", "current"), [(0, 1), (0, 7), (5, 1), (5, 3)])
def test_new_tokens_attend_to_all_of_the_cache(past: int, current: int, tiny_fp32: Package) -> None:
    runner = package_runner(tiny_fp32)
    whole = runner.score(TOKENS[: past + current], 0)
    if past:
        runner.prefill(0, TOKENS[:past], 0)

    logits = runner.score(TOKENS[past : past + current], past)

    assert np.abs(logits - whole[past:]).max() < TOLERANCE


def test_what_lies_behind_the_text_in_the_cache_does_not_matter(tiny_fp32: Package) -> None:
    runner = package_runner(tiny_fp32)
    clean = runner.score(TOKENS[:6], 0)
    runner.score([9] * 100, 0)

    again = runner.score(TOKENS[:6], 0)

    np.testing.assert_array_equal(again, clean)


def test_ragged_batch_equals_each_row_alone(tiny_fp32: Package) -> None:
    prompts: tuple[tuple[int, ...], ...] = (TOKENS[:3], TOKENS[2:9], TOKENS)
    alone = []
    for prompt in prompts:
        runner = package_runner(tiny_fp32)
        runner.prefill(0, prompt, 0)
        alone.append([runner.decode([token], [len(prompt) + i])[0].copy() for i, token in enumerate((40, 41))])

    batched = package_runner(tiny_fp32, slots=3)
    for slot, prompt in enumerate(prompts):
        batched.prefill(slot, prompt, 0)
    for step, token in enumerate((40, 41)):
        logits = batched.decode([token] * 3, [len(prompt) + step for prompt in prompts])
        for row, expected in zip(logits, alone, strict=True):
            assert row.argmax() == expected[step].argmax()
            assert np.abs(row - expected[step]).max() < TOLERANCE


def test_only_the_rows_asked_for_get_logits(tmp_path: Path) -> None:
    import onnxruntime as ort

    config, weights = small_model()
    session = ort.InferenceSession(str(write_graph(tmp_path, config, weights)), providers=["CPUExecutionProvider"])
    past = np.zeros((1, config.num_kv_heads, 16, config.head_dim), dtype=np.float32)

    def logits(rows: list[int]) -> NDArray[np.float32]:
        feeds = {
            "input_ids": np.array([TOKENS], dtype=np.int64),
            **attention_inputs(config, [len(TOKENS)], [0]),
            "logits_rows": np.array(rows, dtype=np.int64),
            **dict.fromkeys(past_names(config), past),
        }
        return np.asarray(session.run(["logits"], feeds)[0])

    everything = logits(list(range(len(TOKENS))))
    picked = logits([7, 2, 11])

    assert picked.shape == (3, config.vocab_size)
    np.testing.assert_allclose(picked, everything[[7, 2, 11]], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(logits([11]), everything[[11]], atol=TOLERANCE, rtol=0)
    assert np.abs(everything[7] - everything[2]).max() > 0.1


def test_an_untied_head_is_used_in_place_of_the_embedding(tmp_path: Path) -> None:
    config, weights = small_model(tie_word_embeddings=False)
    tied_config, _ = small_model()
    tied = ArrayWeights({name: value for name, value in weights.tensors.items() if name != "lm_head.weight"})
    untied_logits = graph_runner(write_graph(tmp_path / "untied", config, weights), config).score(TOKENS, 0)
    tied_logits = graph_runner(write_graph(tmp_path / "tied", tied_config, tied), tied_config).score(TOKENS, 0)

    model = onnx.load(str(tmp_path / "untied" / "model.onnx"))
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}

    np.testing.assert_array_equal(stored["lm_head.weight"], weights.tensor("lm_head.weight"))
    np.testing.assert_array_equal(stored["model.embed_tokens.weight"], weights.tensor("model.embed_tokens.weight"))
    assert np.abs(untied_logits - tied_logits).max() > 1


def test_inputs_and_outputs_are_the_ones_documented(tiny_fp32: Package, tiny_int8: Package) -> None:
    for package in (tiny_fp32, tiny_int8):
        graph = onnx.load(str(package.model_path), load_external_data=False).graph

        inputs = {value.name: shape_of(value) for value in graph.input}
        outputs = {value.name: shape_of(value) for value in graph.output}

        cache = ["batch", 2, "capacity", 16]
        past = {f"past_key_values.{i}.{kind}": cache for i in range(2) for kind in ("key", "value")}
        assert inputs == {
            "input_ids": [1, "tokens"],
            "logits_rows": ["rows"],
            "seqlens_k": ["batch"],
            "query_seqlens": ["batch"],
            "total_sequence_length": [1],
            "lone_tokens": [1],
            "head_rows": ["batch", "padded", "vectors"],
            "output_rows": ["tokens", 4],
            "position_ids": ["batch", "padded_or_one"],
            "attention_bias": ["batch_or_one", 1, "padded_or_one", "total_or_one"],
            **past,
        }
        assert outputs == {
            "logits": ["rows", 512],
            **{f"present.{i}.{kind}": cache for i in range(2) for kind in ("key", "value")},
        }
        assert package.manifest.inputs == tuple(inputs)
        assert package.manifest.outputs == tuple(outputs)


def test_the_real_size_has_48_cache_tensors() -> None:
    config, _ = small_model(num_hidden_layers=24)

    assert len(past_names(config)) == len(present_names(config)) == 48


def shape_of(value: Any) -> list[int | str]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
