"""Measuring the engine: the figures follow from tokens and times, and faults are counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from packages import ONE_THREAD, package_runner
from scripted import ScriptedRunner

from qwenonnx.bench import streams as module
from qwenonnx.bench.copying import measure_copying
from qwenonnx.bench.jobs import Job, greedy, percentile
from qwenonnx.bench.soak import soak
from qwenonnx.bench.streams import measure_interference, measure_streams
from qwenonnx.bench.turns import measure_turns
from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.load import load_model
from qwenonnx.errors import EngineError
from qwenonnx.package.package import Package
from qwenonnx.text.tokenizer import Tokenizer


@contextmanager
def running(package: Package) -> Iterator[Engine]:
    """An engine over the tiny model, started and closed."""
    runner = package_runner(package, slots=12, context=512)
    engine = Engine(runner, Tokenizer.load(package.folder), EngineConfig(max_running=8))
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def job(submitted: float, *times: float) -> Job:
    return Job(greedy([1], len(times)), times=list(times), submitted=submitted)


def test_the_rate_counts_while_all_streams_are_being_written() -> None:
    # From 1.0 to 3.0 both are: three tokens of the first and two of the second come in that time.
    jobs = [job(0.0, 0.5, 1.0, 1.5, 2.0, 3.0), job(0.5, 0.5, 1.0, 2.0, 3.5)]

    assert module._decode_rate(jobs) == pytest.approx(5 / 2)
    assert module._whole_rate(jobs) == pytest.approx(9 / 4)


def test_streams_that_never_run_together_have_no_common_rate() -> None:
    assert module._decode_rate([job(0.0, 0.1, 0.2), job(0.0, 0.3, 0.4)]) is None


def test_percentiles() -> None:
    values = [float(value) for value in range(101)]

    assert [percentile(values[::-1], share) for share in (0.0, 0.5, 0.95, 1.0)] == [0, 50, 95, 100]


def test_streams_have_exactly_their_tokens(tiny_fp32: Package) -> None:
    calls: list[tuple[int, int]] = []
    with running(tiny_fp32) as engine:
        measured = measure_streams(
            engine, 383, (1, 4), prompt_tokens=20, new_tokens=8, repeats=2, progress=lambda *call: calls.append(call)
        )

    assert [(entry.streams, entry.prompt_tokens, entry.new_tokens) for entry in measured] == [(1, 20, 8), (4, 20, 8)]
    assert all(entry.whole_rate > 0 and entry.ttft_p95 >= entry.ttft_p50 > 0 for entry in measured)
    assert calls == [(done, 6) for done in range(1, 7)]


def test_long_prompts_beside_answers(tiny_fp32: Package) -> None:
    with running(tiny_fp32) as engine:
        beside = measure_interference(engine, 383, streams=3, prompt_tokens=200, new_tokens=200)
        assert (engine.num_running, engine.num_waiting) == (0, 0)

    assert (beside.streams, beside.prompt_tokens) == (3, 200)
    assert 0 < beside.itl_p95_beside <= beside.itl_max_beside
    assert beside.itl_p95_alone > 0


def test_turns_grow_and_all_but_the_new_tokens_are_cached(tiny_fp32: Package) -> None:
    with running(tiny_fp32) as engine:
        turns = measure_turns(engine, 383, turns=4, turn_tokens=30, new_tokens=5, repeats=2)

    assert [entry.turn for entry in turns] == [1, 2, 3, 4]
    assert [entry.prompt_tokens for entry in turns] == [30, 65, 100, 135]
    # The last token of an answer was sampled, but never run.
    assert [entry.cached_tokens for entry in turns] == [0, 34, 69, 104]


def test_copying_compares_the_same_answers(tiny_fp32: Package) -> None:
    model = load_model(tiny_fp32, ONE_THREAD, engine=EngineConfig.for_one())
    measured = measure_copying(
        lambda ahead: model.another_engine(speculate=ahead), model.chat_template, new_tokens=20, repeats=2
    )

    assert [entry.task for entry in measured] == ["edit of a file", "free text"]
    assert all(entry.same for entry in measured)


def test_a_soak_finds_nothing_wrong_with_a_sound_engine(tiny_fp32: Package) -> None:
    with running(tiny_fp32) as engine:
        report = soak(engine, 383, requests=60, streams=8)

    assert (report.requests, report.failed, report.differing, report.left_over) == (60, 0, 0, 0)
    assert report.threads_left_over == 0
    assert 0 < report.aborted < 60
    assert report.compared > 0


def test_a_soak_counts_what_fails(tiny_tokenizer: Tokenizer) -> None:
    runner = ScriptedRunner([5], vocab_size=512, num_slots=4, faults={2: EngineError("broken")})
    engine = Engine(runner, tiny_tokenizer, EngineConfig(max_running=4))
    engine.start()
    try:
        report = soak(engine, 383, requests=12, streams=4)
    except EngineError:  # of an answer that was written again
        return
    finally:
        engine.close()
    assert report.failed > 0
