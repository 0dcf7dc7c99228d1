"""A token's logits have the same bits however the step that it is in is made up (recipe `int8`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from packages import package_runner

from qwenonnx.package.package import Package
from qwenonnx.runtime.fused_runner import FusedRunner

CONTEXT = 300


def tokens(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 500, length)]


def runner_of(package: Package, slots: int = 1) -> FusedRunner:
    runner = package_runner(package, slots=slots, context=CONTEXT)
    assert isinstance(runner, FusedRunner)
    return runner


def in_pieces(runner: FusedRunner, ids: Sequence[int], sizes: Sequence[int]) -> NDArray[np.float32]:
    """Logits of all tokens, run in pieces of the sizes in turn."""
    results, at, turns = [], 0, itertools.cycle(sizes)
    while at < len(ids):
        size = next(turns)
        results.append(runner.score(ids[at : at + size], at))
        at += size
    return np.concatenate(results)


@pytest.mark.parametrize("sizes", [[1], [2], [129], [128, 1], [1, 7, 1, 64], [257]])
def test_pieces_of_any_size_give_the_same_bits_as_the_whole(tiny_int8: Package, sizes: list[int]) -> None:
    ids = tokens(CONTEXT)
    runner = runner_of(tiny_int8)
    whole = runner.score(ids, 0).copy()

    np.testing.assert_array_equal(in_pieces(runner, ids, sizes), whole)


def test_rows_that_run_together_get_the_bits_that_they_get_alone(tiny_int8: Package) -> None:
    texts = [tokens(200, seed) for seed in range(4)]
    alone = [runner_of(tiny_int8).score(text, 0) for text in texts]
    together = runner_of(tiny_int8, slots=4)
    generator = np.random.default_rng(7)
    done = [0, 0, 0, 0]

    while min(done) < 200:
        # A single token, a draft, part of a prompt, or nothing, for each of the rows.
        sizes = [min(int(generator.choice([0, 1, 1, 5, 40])) if at else 3, 200 - at) for at in done]
        chunks = [text[at : at + size] for text, at, size in zip(texts, done, sizes, strict=True)]
        if not any(sizes):
            continue
        logits = together.step(chunks, done, range(sum(sizes)))
        at = 0
        for row, size in enumerate(sizes):
            expected = alone[row][done[row] : done[row] + size]
            np.testing.assert_array_equal(logits[at : at + size], expected)
            at += size
            done[row] += size


def test_a_step_gives_the_last_logits_of_each_chunk_by_default(tiny_int8: Package) -> None:
    texts = [tokens(9, 1), tokens(4, 2)]
    runner = runner_of(tiny_int8, slots=3)
    expected = [runner_of(tiny_int8).score(text, 0)[-1] for text in texts]

    np.testing.assert_array_equal(runner.step(texts, [0, 0]), expected)


def test_the_last_position_of_the_context_can_be_used(tiny_int8: Package) -> None:
    ids = tokens(CONTEXT)
    runner = runner_of(tiny_int8)
    whole = runner.score(ids, 0).copy()

    runner.score(ids[:-1], 0)
    np.testing.assert_array_equal(runner.decode([ids[-1]], [CONTEXT - 1])[0], whole[-1])


def test_the_last_position_of_the_models_own_context_can_be_used(tiny_int8: Package) -> None:
    length = tiny_int8.config.context_length
    runner = package_runner(tiny_int8, context=length)
    ids = tokens(length)
    whole = runner.prefill(0, ids, 0).copy()

    np.testing.assert_array_equal(runner.decode([ids[-1]], [length - 1])[0], whole)
