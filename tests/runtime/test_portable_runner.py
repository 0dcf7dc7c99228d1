"""Graphs with a growing cache: every variant computes what the fused graph does, or is refused in one sentence."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_graphs import (
    Change,
    in_half_precision,
    portable_model,
    renamed,
    save,
    with_a_cache_branch,
    with_chosen_logits,
    with_fixed_axis,
    with_input,
    with_last_logits_only,
    with_one_row,
    with_open_vocabulary,
    without_past,
    without_positions,
)
from numpy.typing import NDArray
from packages import ONE_THREAD, TOKENS, graph_runner, package_runner, small_model, write_graph

from qwenonnx.config import ModelConfig
from qwenonnx.errors import EngineError, PackageError
from qwenonnx.package.package import Package
from qwenonnx.runtime.portable_runner import PortableRunner

EXACT = 1e-4
HALF = 5e-2
PAST = "past_key_values"


def unchanged(model: Any) -> None:
    """Optimum's own form."""


VARIANTS: dict[str, tuple[Change, float]] = {
    "as Optimum has it": (unchanged, EXACT),
    "no position_ids": (without_positions, EXACT),
    "fp16": (in_half_precision, HALF),
    "last logits only": (with_last_logits_only, EXACT),
    "num_logits_to_keep": (with_chosen_logits, EXACT),
    "use_cache_branch": (with_a_cache_branch, EXACT),
    "names with ::": (renamed(lambda name: name.replace(".", "::")), EXACT),
    "names with past.0.key": (renamed(lambda name: name.replace(PAST, "past")), EXACT),
    "names with /decoder": (renamed(lambda name: name.replace(".", "/").replace("/key", "/decoder/key")), EXACT),
    "one row": (with_one_row, EXACT),
    "vocabulary not told": (with_open_vocabulary, EXACT),
}


def runner_of(
    folder: Path, change: Change = unchanged, *, slots: int = 1, context: int = 128, **overrides: Any
) -> PortableRunner:
    model = portable_model(folder, **overrides)
    change(model)
    config, _ = small_model(**overrides)
    return PortableRunner(
        save(model, folder / "model.onnx"), config, ONE_THREAD, num_slots=slots, context_length=context
    )


@pytest.fixture(scope="module")
def expected(tiny_fp32: Package) -> NDArray[np.float32]:
    """The fused graph's logits of all tokens."""
    return package_runner(tiny_fp32).score(TOKENS, 0)


@pytest.fixture
def runner(tmp_path: Path) -> PortableRunner:
    return runner_of(tmp_path / "graph", slots=3)


@pytest.mark.parametrize("name", VARIANTS)
def test_whole_in_steps_and_in_chunks_it_computes_what_the_fused_graph_does(
    name: str, expected: NDArray[np.float32], tmp_path: Path
) -> None:
    change, tolerance = VARIANTS[name]
    runner = runner_of(tmp_path / "graph", change)

    whole = runner.score(TOKENS, 0)
    last = runner.prefill(0, TOKENS, 0).copy()
    steps = [runner.decode([token], [at])[0].copy() for at, token in enumerate(TOKENS)]
    chunks = [runner.prefill(0, TOKENS[:5], 0).copy(), runner.prefill(0, TOKENS[5:], 5).copy()]

    assert whole.dtype == last.dtype == np.float32
    np.testing.assert_allclose(whole, expected, atol=tolerance, rtol=0)
    np.testing.assert_allclose(last, expected[-1], atol=tolerance, rtol=0)
    np.testing.assert_allclose(np.stack(steps), expected, atol=tolerance, rtol=0)
    np.testing.assert_allclose(np.stack(chunks), expected[[4, -1]], atol=tolerance, rtol=0)


@pytest.mark.parametrize("heads", [1, 4])
def test_any_number_of_key_value_heads_runs(heads: int, tmp_path: Path) -> None:
    config, weights = small_model(num_key_value_heads=heads)
    fused = graph_runner(write_graph(tmp_path / "fused", config, weights), config)

    runner = runner_of(tmp_path / "portable", num_key_value_heads=heads)

    np.testing.assert_allclose(runner.score(TOKENS, 0), fused.score(TOKENS, 0), atol=EXACT, rtol=0)


@pytest.mark.parametrize(("past", "current"), [(0, 1), (0, 7), (5, 1), (5, 3)])
def test_the_mask_is_as_long_as_past_and_current(
    past: int, current: int, runner: PortableRunner, expected: NDArray[np.float32]
) -> None:
    if past:
        runner.prefill(0, TOKENS[:past], 0)

    logits = runner.score(TOKENS[past : past + current], past)

    np.testing.assert_allclose(logits, expected[past : past + current], atol=EXACT, rtol=0)


def test_rewinding_takes_the_beginning_of_the_cache(runner: PortableRunner, expected: NDArray[np.float32]) -> None:
    runner.prefill(0, [*TOKENS[:5], *[9] * 20], 0)

    np.testing.assert_allclose(runner.score(TOKENS[5:], 5), expected[5:], atol=EXACT, rtol=0)


def test_rows_run_in_turn_and_do_not_touch_each_other(runner: PortableRunner, expected: NDArray[np.float32]) -> None:
    runner.prefill(0, TOKENS[:5], 0)
    runner.prefill(1, TOKENS[::-1], 0)
    runner.prefill(2, TOKENS[:8], 0)

    logits = runner.decode([TOKENS[5], 7, TOKENS[8]], [5, 12, 8])

    assert (runner.num_slots, runner.max_batch) == (3, 1)
    assert logits.shape == (3, 512)
    np.testing.assert_allclose(logits[[0, 2]], expected[[5, 8]], atol=EXACT, rtol=0)


def test_a_copied_row_goes_its_own_way(runner: PortableRunner, expected: NDArray[np.float32]) -> None:
    runner.prefill(0, TOKENS[:9], 0)
    runner.copy_row(0, 1, 5)
    runner.prefill(1, [8, 8, 8], 5)
    runner.copy_row(0, 2, 9)
    runner.swap_rows(0, 2, 9, 9)

    np.testing.assert_allclose(runner.prefill(0, TOKENS[9:], 9), expected[-1], atol=EXACT, rtol=0)
    np.testing.assert_allclose(runner.score(TOKENS[5:], 5, 2), expected[5:], atol=EXACT, rtol=0)


def test_nothing_can_follow_what_was_not_run(runner: PortableRunner) -> None:
    runner.prefill(0, TOKENS[:5], 0)
    with pytest.raises(EngineError, match=r"the row holds 5 tokens, so nothing can be put at 6\."):
        runner.prefill(0, TOKENS[6:], 6)

    runner.release_row(0, 3)
    with pytest.raises(EngineError, match="holds 3 tokens"):
        runner.decode([1], [4])
    runner.release_memory()
    with pytest.raises(EngineError, match="holds 0 tokens"):
        runner.decode([1], [3])


def test_what_cannot_be_run_is_an_error_and_leaves_the_cache(runner: PortableRunner) -> None:
    runner.prefill(0, TOKENS[:5], 0)
    before = runner.prefill(0, TOKENS[5:], 5).copy()

    with pytest.raises(EngineError, match="the model run failed: "):
        runner.prefill(0, [512], 5)
    np.testing.assert_array_equal(runner.prefill(0, TOKENS[5:], 5), before)


def test_a_run_is_cancelled_from_another_thread(tmp_path: Path) -> None:
    runner = runner_of(tmp_path / "graph", context=2048)
    stop = threading.Event()

    def cancel() -> None:
        while not stop.wait(0.001):
            runner.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    try:
        with pytest.raises(EngineError, match="cancelled"):
            runner.prefill(0, [5] * 2000, 0)
    finally:
        stop.set()
        thread.join()
    assert np.isfinite(runner.prefill(0, TOKENS, 0)).all()


def with_a_third_layer(model: Any) -> None:
    for kind in ("key", "value"):
        with_input(f"{PAST}.2.{kind}")(model)


REFUSED: dict[str, tuple[Change, str]] = {
    "past input missing": (without_past(f"{PAST}.1.value"), r"the graph has no input for the values of layer 1\."),
    "sequence fixed": (with_fixed_axis("input_ids", 1, 8), "the sequence axis of input_ids is fixed to 8"),
    "batch fixed": (with_fixed_axis("input_ids", 0, 2), "the batch axis of input_ids is fixed to 2"),
    "past fixed": (with_fixed_axis(f"{PAST}.1.key", 2, 16), rf"the past axis of {PAST}\.1\.key is fixed to 16"),
    "past batch fixed": (with_fixed_axis(f"{PAST}.1.key", 0, 3), rf"the batch axis of {PAST}\.1\.key is fixed to 3"),
    "mask fixed": (with_fixed_axis("attention_mask", 1, 64), "the length axis of attention_mask is fixed to 64"),
    "unknown input": (with_input("inputs_embeds"), "the graph wants an input 'inputs_embeds', which is not known here"),
    "one part twice": (with_input("past.0.key"), "'past.0.key' and 'past_key_values.0.key' are the same part"),
    "layers too many": (with_a_third_layer, "3 layers of KV cache where its configuration tells of 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_cannot_serve_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]

    with pytest.raises(PackageError, match=message) as caught:
        runner_of(tmp_path / "graph", change)
    assert str(tmp_path / "graph" / "model.onnx") in str(caught.value)
    assert "\n" not in str(caught.value)


def other_config(**overrides: Any) -> ModelConfig:
    return small_model(**overrides)[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 520}, "it gives 512 logits, but its configuration tells of 520 tokens"),
        ({"num_hidden_layers": 3}, r"the graph has no input for the keys of layer 2\."),
        ({"num_hidden_layers": 1}, "2 layers of KV cache where its configuration tells of 1"),
        ({"num_key_value_heads": 4}, "its cache has 2 heads of 16, but its configuration tells of 4 of 16"),
        ({"head_dim": 32}, "its cache has 2 heads of 16, but its configuration tells of 2 of 32"),
    ],
)
def test_a_graph_of_another_configuration_is_refused(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save(portable_model(tmp_path / "graph"), tmp_path / "graph" / "model.onnx")

    with pytest.raises(PackageError, match=message):
        PortableRunner(path, other_config(**overrides), ONE_THREAD)


def test_another_vocabulary_that_the_graph_does_not_tell_is_found_when_it_runs(tmp_path: Path) -> None:
    model = portable_model(tmp_path / "graph")
    with_open_vocabulary(model)
    runner = PortableRunner(save(model, tmp_path / "graph" / "m.onnx"), other_config(vocab_size=256), ONE_THREAD)

    with pytest.raises(EngineError, match="gives 512 logits, but its configuration tells of 256 tokens"):
        runner.prefill(0, TOKENS[:3], 0)
