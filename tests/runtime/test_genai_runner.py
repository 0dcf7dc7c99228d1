"""Graphs in the style of onnxruntime-genai: attention appends to a cache whose lengths come from a mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from foreign_graphs import genai_model, save, with_last_logits_only, with_one_row
from numpy.typing import NDArray
from packages import ONE_THREAD, TOKENS, package_runner, small_model

from qwenonnx.errors import EngineError
from qwenonnx.package.package import Package
from qwenonnx.runtime.genai_runner import GenaiRunner


@pytest.fixture(scope="module")
def expected(tiny_fp32: Package) -> NDArray[np.float32]:
    """The fused graph's logits of all tokens."""
    return package_runner(tiny_fp32).score(TOKENS, 0)


@pytest.fixture(scope="module")
def model_path(tiny_fp32: Package, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(genai_model(tiny_fp32), tmp_path_factory.mktemp("genai") / "model.onnx", "model.onnx.data")


def runner_of(path: Path, *, slots: int = 3, context: int = 128) -> GenaiRunner:
    return GenaiRunner(path, small_model()[0], ONE_THREAD, num_slots=slots, context_length=context)


def test_whole_in_steps_and_in_chunks_it_computes_what_the_fused_graph_does(
    model_path: Path, expected: NDArray[np.float32]
) -> None:
    runner = runner_of(model_path)

    np.testing.assert_allclose(runner.score(TOKENS, 0), expected, atol=1e-4, rtol=0)
    np.testing.assert_allclose(runner.prefill(0, TOKENS, 0), expected[-1], atol=1e-4, rtol=0)
    for at, token in enumerate(TOKENS):
        np.testing.assert_allclose(runner.decode([token], [at])[0], expected[at], atol=1e-4, rtol=0)
    runner.prefill(0, TOKENS[:5], 0)
    np.testing.assert_allclose(runner.prefill(0, TOKENS[5:], 5), expected[-1], atol=1e-4, rtol=0)


def test_rows_of_different_lengths_run_together(model_path: Path, expected: NDArray[np.float32]) -> None:
    runner = runner_of(model_path)
    for slot, length in enumerate((5, 9, 2)):
        runner.prefill(slot, TOKENS[:length], 0)

    logits = runner.decode([TOKENS[5], TOKENS[9], TOKENS[2]], [5, 9, 2])

    assert runner.max_batch == 3
    np.testing.assert_allclose(logits, expected[[5, 9, 2]], atol=1e-4, rtol=0)


def test_a_graph_of_one_row_runs_its_rows_in_turn(
    tiny_fp32: Package, expected: NDArray[np.float32], tmp_path: Path
) -> None:
    model = genai_model(tiny_fp32)
    with_one_row(model)
    runner = runner_of(save(model, tmp_path / "model.onnx"))
    for slot, length in enumerate((5, 9)):
        runner.prefill(slot, TOKENS[:length], 0)

    logits = runner.decode([TOKENS[5], TOKENS[9]], [5, 9])

    assert (runner.num_slots, runner.max_batch) == (3, 1)
    np.testing.assert_allclose(logits, expected[[5, 9]], atol=1e-4, rtol=0)


def test_with_the_last_logits_alone_scoring_goes_token_by_token(
    tiny_fp32: Package, expected: NDArray[np.float32], tmp_path: Path
) -> None:
    model = genai_model(tiny_fp32)
    with_last_logits_only(model)
    runner = runner_of(save(model, tmp_path / "model.onnx"))

    for _ in range(2):
        np.testing.assert_allclose(runner.score(TOKENS, 0), expected, atol=1e-4, rtol=0)


def test_what_runs_over_the_cache_is_an_error(model_path: Path) -> None:
    runner = runner_of(model_path, context=16)
    runner.prefill(0, TOKENS, 0)

    with pytest.raises(EngineError, match="the model run failed"):
        runner.prefill(0, [1] * 5, 12)


def test_released_and_copied_rows(model_path: Path, expected: NDArray[np.float32]) -> None:
    runner = runner_of(model_path)
    runner.prefill(0, TOKENS[:9], 0)
    runner.copy_row(0, 1, 9)
    runner.release_row(0, 0)

    np.testing.assert_allclose(runner.score(TOKENS[9:], 9, 1), expected[9:], atol=1e-4, rtol=0)
    runner.release_memory()
    np.testing.assert_allclose(runner.score(TOKENS, 0), expected, atol=1e-4, rtol=0)
