"""Drafts by prompt lookup: fewer steps, the same tokens."""

from __future__ import annotations

import pytest
from packages import package_runner
from scripted import ScriptedRunner

from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.request import Delta, Finished, GenerationRequest
from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.engine.speculation import PromptLookup
from qwenonnx.package.package import Package
from qwenonnx.text.tokenizer import Tokenizer

PAGE = [20 + (i * 7) % 90 for i in range(60)]


def test_a_draft_is_what_followed_last_time() -> None:
    lookup = PromptLookup()
    assert lookup.draft([1, 2, 3, 4, 5, 1, 2, 3], 2) == (4, 5)
    assert lookup.draft([1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3], 3) == (9, 1, 2)
    assert lookup.draft([1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3], 0) == ()
    assert lookup.draft([1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3, 8], 3) == ()


@pytest.mark.parametrize("ids", [[], [1], [1, 2], [1, 2, 3], [1, 1, 1]])
def test_short_beginnings_have_no_draft(ids: list[int]) -> None:
    assert PromptLookup().draft(ids, 5) == ()


def test_drafts_grow_while_they_are_right_and_pause_when_they_are_not() -> None:
    lookup = PromptLookup()
    ids = [*PAGE, *PAGE[:3]]
    assert len(lookup.draft(ids, 99)) == 3
    lookup.learn(3, 3, len(ids))
    assert len(lookup.draft(ids, 99)) == 7
    lookup.learn(7, 7, len(ids))
    lookup.learn(15, 15, len(ids))
    assert len(lookup.draft(ids, 99)) == 15
    lookup.learn(15, 3, len(ids))
    assert len(lookup.draft(ids, 99)) == 7
    lookup.learn(7, 0, len(ids))
    assert lookup.draft(ids, 99) == ()
    assert len(lookup.draft([*ids, *PAGE[3:7]], 99)) == 3


def engine_with(runner: ScriptedRunner, tokenizer: Tokenizer, *, speculate: bool) -> Engine:
    engine = Engine(runner, tokenizer, EngineConfig(max_running=1, cached_rows=0, speculate=speculate))
    engine.start()
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_copied_text_takes_less_than_half_of_the_steps(tiny_tokenizer: Tokenizer, temperature: float) -> None:
    wanted = [*PAGE[:30], 5, *PAGE[31:]]
    steps, answers = [], []
    for speculate in (False, True):
        runner = ScriptedRunner(wanted, vocab_size=512, sharpness=50.0)
        engine = engine_with(runner, tiny_tokenizer, speculate=speculate)
        request = GenerationRequest(
            (1, 2, *PAGE, 3), SamplingParams(temperature=temperature, seed=1), max_tokens=60, ignore_eos=True
        )
        events = list(engine.generate(request))
        engine.close()
        answers.append([i for event in events if isinstance(event, Delta) for i in event.token_ids])
        assert isinstance(events[-1], Finished)
        assert events[-1].usage.completion_tokens == 60
        steps.append(len(runner.decode_calls) + len(runner.score_calls))
    assert answers == [wanted, wanted]
    assert steps[0] == 59
    assert 2 * steps[1] < steps[0]


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.6, top_p=0.9, seed=11)])
@pytest.mark.parametrize("count", [1, 2, 3, 40])
def test_the_same_tokens_on_a_real_graph(tiny_fp32: Package, sampling: SamplingParams, count: int) -> None:
    tokenizer = Tokenizer.load(tiny_fp32.folder)
    prompt = (*PAGE, *PAGE, *PAGE[:10])
    answers = []
    for speculate in (False, True):
        config = EngineConfig(max_running=1, cached_rows=0, speculate=speculate)
        engine = Engine(package_runner(tiny_fp32, context=256), tokenizer, config)
        engine.start()
        for _ in range(2):  # the second time on a row that holds drafts of the first
            events = list(engine.generate(GenerationRequest(prompt, sampling, max_tokens=count, ignore_eos=True)))
            answers.append([i for event in events if isinstance(event, Delta) for i in event.token_ids])
        engine.close()
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) == count


def test_several_at_once_run_without_drafts(tiny_tokenizer: Tokenizer) -> None:
    runner = ScriptedRunner(PAGE, vocab_size=512, num_slots=2)
    engine = Engine(runner, tiny_tokenizer, EngineConfig(max_running=2, cached_rows=0, speculate=True))
    streams = [engine.generate(GenerationRequest((1, *PAGE, i), max_tokens=40, ignore_eos=True)) for i in (2, 3)]
    engine.start()
    ends = [list(stream)[-1] for stream in streams]
    engine.close()
    assert all(isinstance(end, Finished) for end in ends)
    assert max(len(ids) for ids, _ in runner.decode_calls) == 2
