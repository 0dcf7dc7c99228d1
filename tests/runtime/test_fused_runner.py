"""Running the fused graph over its own cache memory."""

from __future__ import annotations

import threading

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from packages import TOKENS, package_runner

from qwenonnx.errors import EngineError
from qwenonnx.graph.names import past_names, present_names
from qwenonnx.package.package import Package
from qwenonnx.runtime.attention_inputs import attention_inputs
from qwenonnx.runtime.memory import STATUS

CONTEXT = 2048


def test_sizes_are_known(tiny_fp32: Package) -> None:
    runner = package_runner(tiny_fp32, slots=3, context=100)

    assert (runner.num_slots, runner.context_length, runner.vocab_size) == (3, 100, 512)


def test_prefill_returns_the_last_row_of_score(tiny_fp32: Package) -> None:
    runner = package_runner(tiny_fp32)

    scored = runner.score(TOKENS, 0)

    np.testing.assert_allclose(runner.prefill(0, TOKENS, 0), scored[-1], atol=1e-4, rtol=0)


def test_rows_do_not_touch_each_other(tiny_fp32: Package) -> None:
    runner = package_runner(tiny_fp32, slots=2)
    runner.prefill(0, TOKENS[:8], 0)
    expected = package_runner(tiny_fp32)
    expected.prefill(0, TOKENS[:8], 0)

    runner.prefill(1, TOKENS[::-1], 0)

    np.testing.assert_allclose(runner.decode([3], [8])[0], expected.decode([3], [8])[0], atol=1e-5, rtol=0)


def test_rewinding_needs_no_call(tiny_fp32: Package) -> None:
    runner = package_runner(tiny_fp32)
    runner.prefill(0, TOKENS, 0)
    first = runner.prefill(0, TOKENS[5:9], 5).copy()
    runner.prefill(0, [1] * 20, 9)

    np.testing.assert_array_equal(runner.prefill(0, TOKENS[5:9], 5), first)


@pytest.mark.parametrize("recipe", ["tiny_fp32", "tiny_int8"])
def test_a_cache_bound_in_place_equals_one_that_is_copied(recipe: str, request: pytest.FixtureRequest) -> None:
    package: Package = request.getfixturevalue(recipe)
    runner = package_runner(package)
    steps = [list(TOKENS[:6]), *[[token] for token in TOKENS[6:]]]

    start = 0
    copied = copying_path(package, steps)
    for chunk, expected in zip(steps, copied, strict=True):
        np.testing.assert_array_equal(runner.prefill(0, chunk, start), expected)
        start += len(chunk)


@pytest.mark.parametrize(
    ("ids", "start"),
    [([1] * 17, 0), ([1] * 4, 13), ([1], 16), ([], 0), ([512], 0)],
    ids=["too long", "runs over", "full", "empty", "no such token"],
)
def test_what_cannot_be_run_is_an_error_and_no_garbage(
    ids: list[int], start: int, tiny_fp32: Package, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = package_runner(tiny_fp32, context=16)
    expected = runner.prefill(0, TOKENS, 0).copy()

    with pytest.raises(EngineError, match="the model run failed: "):
        runner.prefill(0, ids, start)

    np.testing.assert_array_equal(runner.prefill(0, TOKENS, 0), expected)
    assert capfd.readouterr().err == ""


def test_a_long_prefill_can_be_cancelled_from_another_thread(
    tiny_fp32: Package, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = package_runner(tiny_fp32, context=CONTEXT)
    expected = runner.prefill(0, TOKENS, 0).copy()
    over = threading.Event()

    def keep_cancelling() -> None:
        while not over.wait(0.001):
            runner.cancel()

    def keep_prefilling() -> None:
        for _ in range(100):  # one may be over before the first cancel
            runner.prefill(0, [7] * CONTEXT, 0)

    canceller = threading.Thread(target=keep_cancelling)
    canceller.start()
    try:
        with pytest.raises(EngineError, match="cancelled"):
            keep_prefilling()
    finally:
        over.set()
        canceller.join()

    np.testing.assert_array_equal(runner.prefill(0, TOKENS, 0), expected)
    assert capfd.readouterr().err == ""


def test_cancelling_an_idle_runner_does_nothing(tiny_fp32: Package) -> None:
    runner = package_runner(tiny_fp32)

    runner.cancel()

    assert runner.prefill(0, TOKENS, 0).shape == (512,)


@pytest.mark.skipif(not STATUS.exists(), reason="this system has no /proc/self/status")
def test_released_memory_is_usable_again(tiny_fp32: Package) -> None:
    runner = package_runner(tiny_fp32)
    expected = runner.prefill(0, TOKENS, 0).copy()

    runner.release_memory()

    np.testing.assert_array_equal(runner.prefill(0, TOKENS, 0), expected)


def copying_path(package: Package, steps: list[list[int]]) -> list[NDArray[np.float32]]:
    """Last-row logits of each step with a cache that is copied out and in again by plain `run` calls."""
    config = package.config
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(package.model_path), options, providers=["CPUExecutionProvider"])
    shape = (1, config.num_kv_heads, 128, config.head_dim)
    cache = [np.zeros(shape, dtype=np.float32) for _ in past_names(config)]
    results: list[NDArray[np.float32]] = []
    length = 0
    for chunk in steps:
        feeds = {
            "input_ids": np.array([chunk], dtype=np.int64),
            **attention_inputs(config, [len(chunk)], [length]),
            "logits_rows": np.array([len(chunk) - 1], dtype=np.int64),
            **dict(zip(past_names(config), cache, strict=True)),
        }
        logits, *cache = session.run(["logits", *present_names(config)], feeds)
        length += len(chunk)
        results.append(logits[0])
    return results
