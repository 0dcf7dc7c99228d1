"""Drafts by prompt lookup: fewer steps, the same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from packages import package_runner
from scripted import ScriptedRunner

from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.request import Delta, Event, Finished, GenerationRequest
from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.engine.speculation import PromptLookup
from qwenonnx.engine.step_costs import StepCosts
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import PackageRunner
from qwenonnx.text.tokenizer import Tokenizer

COSTS = StepCosts(draft_base=1.1, draft_slope=0.07, row_slope=0.15)
CHEAP = StepCosts(draft_base=1.0, draft_slope=0.0)
PAGE = [20 + (i * 7) % 90 for i in range(60)]


def told(ids: list[int], start: int, rate: float = 1.0, costs: StepCosts = COSTS) -> list[tuple[int, ...]]:
    """Drafts before each of the tokens from `start` on."""
    lookup = PromptLookup()
    return [lookup.draft(ids[:length], 99, costs, rate) for length in range(start, len(ids))]


def test_a_draft_is_what_followed_last_time() -> None:
    assert PromptLookup().draft([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4], 2, COSTS) == (5, 6)
    assert PromptLookup().draft([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4], 0, COSTS) == ()
    assert PromptLookup().draft([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 5], 2, COSTS) == ()


@pytest.mark.parametrize("ids", [[], [1], [1, 2], [1, 2, 3], [1, 1]])
def test_short_beginnings_have_no_draft(ids: list[int]) -> None:
    assert PromptLookup().draft(ids, 5, CHEAP) == ()


def test_an_end_that_repeats_itself_is_continued() -> None:
    assert PromptLookup().draft([7, *[1, 2, 3] * 6], 7, CHEAP) == (1, 2, 3, 1, 2, 3, 1)


def test_drafts_grow_while_they_are_right() -> None:
    lengths = [len(draft) for draft in told([*PAGE, *PAGE], 70)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == 15


def test_no_draft_where_steps_of_several_tokens_do_not_pay() -> None:
    slow = StepCosts(draft_base=1.0, draft_slope=1.0)
    assert not any(told([*PAGE, *PAGE], 64, costs=slow))


def test_a_higher_rate_asks_for_surer_drafts() -> None:
    assert not any(told([*PAGE, *PAGE], 64, rate=8.0))
    drafts = told([*PAGE, *PAGE], 64, rate=3.0)
    assert not drafts[0]
    assert drafts[-1]


def test_drafts_end_where_guesses_are_wrong_and_come_back_by_themselves() -> None:
    chance = random.Random(3)
    noise = [chance.randrange(12) for _ in range(600)]
    drafts = told([*noise, *PAGE, 1, 2, *PAGE], 20)
    assert any(drafts[:60])
    assert sum(map(bool, drafts[300:580])) < 0.1 * 280
    assert len(drafts[-1]) > 5


def test_a_copy_goes_on_behind_one_other_token() -> None:
    ids = [*PAGE, 5, *PAGE[:30], 5, *PAGE[31:33]]
    lookup = PromptLookup()
    for length in range(62, len(ids) - 2):
        lookup.draft(ids[:length], 9, CHEAP)
    assert lookup.draft(ids[:-2], 9, CHEAP)[:2] == tuple(PAGE[31:33])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=80), st.integers(0, 20))
def test_drafts_are_as_short_as_asked_and_of_known_tokens(ids: list[int], limit: int) -> None:
    lookup = PromptLookup()
    for length in range(1, len(ids) + 1):
        draft = lookup.draft(ids[:length], limit, CHEAP)
        assert len(draft) <= limit
        assert set(draft) <= set(ids[:length])
        assert lookup.draft(ids[:length], limit, CHEAP) == draft


class CountingRunner:
    """A runner whose steps are counted: rows and lengths of what was scored, and steps of one token a row."""

    def __init__(self, runner: PackageRunner) -> None:
        self._runner = runner
        self.scored: list[tuple[int, int]] = []
        self.decoded = 0

    def score(self, token_ids: Sequence[int], start: int, slot: int = 0) -> NDArray[np.float32]:
        self.scored.append((slot, len(token_ids)))
        return self._runner.score(token_ids, start, slot)

    def decode(self, token_ids: Sequence[int], starts: Sequence[int]) -> NDArray[np.float32]:
        self.decoded += 1
        return self._runner.decode(token_ids, starts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def tokens(events: list[Event]) -> list[int]:
    return [i for event in events if isinstance(event, Delta) for i in event.token_ids]


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
        answers.append(tokens(events))
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
        config = EngineConfig(max_running=1, cached_rows=0, speculate=speculate, costs=CHEAP)
        runner = CountingRunner(package_runner(tiny_fp32, context=256))
        engine = Engine(runner, tokenizer, config)
        engine.start()
        for _ in range(2):  # the second time on a row that holds drafts of the first
            events = list(engine.generate(GenerationRequest(prompt, sampling, max_tokens=count, ignore_eos=True)))
            answers.append(tokens(events))
        engine.close()
    assert all(answer == answers[0] for answer in answers)
    assert len(answers[0]) == count
    if count == 40:
        assert len(runner.scored) > 5


@pytest.mark.parametrize(
    ("costs", "drafted"),
    [
        (StepCosts(draft_base=1.1, draft_slope=0.07, row_slope=0.9), True),
        (StepCosts(draft_base=1.1, draft_slope=0.5, row_slope=0.0), False),
    ],
)
def test_several_at_once_have_drafts_in_turn_where_that_pays(
    tiny_tokenizer: Tokenizer, costs: StepCosts, drafted: bool
) -> None:
    runner = ScriptedRunner(PAGE, vocab_size=512, num_slots=3)
    config = EngineConfig(max_running=3, cached_rows=0, speculate=True, costs=costs)
    engine = Engine(runner, tiny_tokenizer, config)
    streams = [engine.generate(GenerationRequest((1, *PAGE, i), max_tokens=60, ignore_eos=True)) for i in (2, 3, 4)]
    engine.start()
    answers = [list(stream) for stream in streams]
    engine.close()
    assert all(tokens(events) == PAGE for events in answers)
    assert bool(runner.score_calls) == drafted
    if drafted:
        together = [slot for slot, _, _ in runner.score_calls]
        assert {0, 1, 2} <= set(together)
        assert max(len(ids) for ids, _ in runner.decode_calls) == 3


def test_rules_hold_inside_of_a_draft(tiny_tokenizer: Tokenizer) -> None:
    letters = [i for c in "abcdefghijklmnopqrstuvwxyz" for i in tiny_tokenizer.encode(c)]
    assert len(letters) == 26
    for request in (
        GenerationRequest((1, *letters, 2), max_tokens=26, stop=("mno",), ignore_eos=True),
        GenerationRequest((1, *letters, 2), max_tokens=26, stop_token_ids=frozenset({letters[14]})),
        GenerationRequest((1, *letters, 2), max_tokens=17, ignore_eos=True),
        GenerationRequest((1, *letters, 2), SamplingParams(presence_penalty=11.0), max_tokens=26, ignore_eos=True),
        GenerationRequest((1, *letters, 2), max_tokens=26, ignore_eos=True, logprobs=2),
    ):
        ends = []
        for speculate in (False, True):
            runner = ScriptedRunner([*letters, *letters], vocab_size=512)
            engine = engine_with(runner, tiny_tokenizer, speculate=speculate)
            events = list(engine.generate(request))
            engine.close()
            last = events[-1]
            assert isinstance(last, Finished)
            deltas = [event for event in events if isinstance(event, Delta)]
            ends.append((deltas, last.reason, last.usage))
            assert bool(runner.score_calls) == speculate
        assert ends[0] == ends[1]


@pytest.mark.parametrize("chunk", [16, 256])
def test_many_at_once_on_a_real_graph_have_the_answers_they_have_alone(tiny_fp32: Package, chunk: int) -> None:
    chance = random.Random(chunk)
    requests = []
    for i in range(24):
        part = [chance.randrange(1, 300) for _ in range(chance.randrange(5, 30))]
        sampling = SamplingParams(temperature=0.5, seed=i) if i % 3 == 0 else SamplingParams()
        requests.append(GenerationRequest((*part, *part, *part), sampling, max_tokens=40, ignore_eos=True))
    tokenizer = Tokenizer.load(tiny_fp32.folder)
    answers: list[list[list[int]]] = []
    for speculate, rows in ((False, 1), (True, 4)):
        runner = CountingRunner(package_runner(tiny_fp32, slots=rows, context=256))
        config = EngineConfig(chunk, max_running=rows, cached_rows=0, speculate=speculate, costs=CHEAP)
        engine = Engine(runner, tokenizer, config)
        streams = [engine.generate(request) for request in requests]
        engine.start()
        answers.append([tokens(list(stream)) for stream in streams])
        engine.close()
    assert answers[1] == answers[0]
    assert {0, 1} <= {slot for slot, _ in runner.scored}
    assert runner.decoded < 24 * 39 / 2
