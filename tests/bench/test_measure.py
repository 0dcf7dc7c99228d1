"""Measuring speed: the figures follow from the times of the tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from scripted import ScriptedRunner

from qwenonnx.bench import measure as module
from qwenonnx.bench.measure import Workload, measure
from qwenonnx.bench.prompts import token_ids
from qwenonnx.engine.engine import Engine
from qwenonnx.errors import EngineError
from qwenonnx.text.tokenizer import Tokenizer


@contextmanager
def running(runner: ScriptedRunner, tokenizer: Tokenizer) -> Iterator[Engine]:
    """An engine that is started and closed."""
    engine = Engine(runner, tokenizer, end_ids=frozenset({380}))
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def test_prompts_are_repeatable_and_differ_by_seed() -> None:
    assert token_ids(50, 383) == token_ids(50, 383)
    assert token_ids(50, 383, seed=1) != token_ids(50, 383, seed=2)
    assert len(token_ids(512, 383)) == 512
    assert set(token_ids(5000, 383)) <= set(range(383))


def test_figures_follow_from_the_times_of_the_tokens() -> None:
    # Two runs: first token after 0.5 and 0.7 s, then gaps of 0.1 s with one of 0.4 s.
    runs = [[0.5, 0.6, 0.7, 0.8, 0.9], [0.7, 0.8, 0.9, 1.3, 1.4]]

    result = module._summary(60, runs)

    assert (result.prompt_tokens, result.new_tokens) == (60, 5)
    assert result.ttft == pytest.approx(0.6)
    assert result.prefill_rate == pytest.approx(100)
    assert result.decode_rate == pytest.approx((4 / 0.4 + 4 / 0.7) / 2)
    assert result.itl_p50 == pytest.approx(0.1)
    assert 0.1 - 1e-9 <= result.itl_p95 <= 0.4


def test_every_length_is_run_in_turn_with_one_round_to_warm_up(tiny_tokenizer: Tokenizer) -> None:
    runner = ScriptedRunner([5], vocab_size=512, context_length=256)
    calls: list[tuple[int, int]] = []
    with running(runner, tiny_tokenizer) as engine:
        results = measure(engine, 383, Workload((7, 20), new_tokens=4, repeats=2), lambda *call: calls.append(call))

    assert [result.prompt_tokens for result in results] == [7, 20]
    assert calls == [(done, 6) for done in range(1, 7)]
    assert [len(ids) for _, ids, _ in runner.prefill_calls] == [7, 20] * 3
    prompts = [ids for _, ids, _ in runner.prefill_calls]
    assert all(a[0:2] != b[0:2] for a, b in itertools.combinations(prompts, 2))  # no prefix is reused
    for result in results:
        assert result.new_tokens == 4
        assert math.isfinite(result.decode_rate)
        assert result.ttft > 0


def test_end_tokens_do_not_cut_a_measurement_short(tiny_tokenizer: Tokenizer) -> None:
    runner = ScriptedRunner([380], vocab_size=512, context_length=64)
    with running(runner, tiny_tokenizer) as engine:
        (result,) = measure(engine, 383, Workload((5,), new_tokens=6, repeats=1))

    assert result.new_tokens == 6


def test_a_failed_request_is_raised(tiny_tokenizer: Tokenizer) -> None:
    runner = ScriptedRunner([5], vocab_size=512, context_length=64, faults={2: EngineError("broken")})
    with running(runner, tiny_tokenizer) as engine, pytest.raises(EngineError, match="broken"):
        measure(engine, 383, Workload((5,), new_tokens=6, repeats=1))
