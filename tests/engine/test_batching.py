"""Many requests at once on a real graph: everyone gets the answer that they would get alone."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator

import pytest
from packages import package_runner

from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.engine import Engine
from qwenonnx.engine.request import Delta, Event, Failed, Finished, GenerationRequest, PromptLogprobs
from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.package.package import Package
from qwenonnx.text.tokenizer import Tokenizer

ROWS = 20


@pytest.fixture
def engine(tiny_fp32: Package) -> Iterator[Engine]:
    config = EngineConfig(prefill_chunk=24, max_queue=1000, max_running=16, cached_rows=4, kv_tokens=16 * 96)
    runner = package_runner(tiny_fp32, slots=ROWS, context=256)
    engine = Engine(runner, Tokenizer.load(tiny_fp32.folder), config)
    engine.start()
    yield engine
    engine.close(20)
    assert not engine.is_alive


@pytest.fixture
def alone(tiny_fp32: Package) -> Iterator[Engine]:
    runner = package_runner(tiny_fp32, context=256)
    engine = Engine(runner, Tokenizer.load(tiny_fp32.folder), EngineConfig.for_one())
    engine.start()
    yield engine
    engine.close(20)


def tokens(events: list[Event]) -> tuple[int, ...]:
    return tuple(token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids)


def some_requests(count: int, seed: int) -> list[GenerationRequest]:
    chance = random.Random(seed)
    beginnings = [[chance.randrange(1, 300) for _ in range(40)] for _ in range(3)]
    requests = []
    for i in range(count):
        prompt = chance.choice(beginnings)[: chance.randrange(1, 40)]
        prompt = prompt + [chance.randrange(1, 300) for _ in range(chance.randrange(1, 60))]
        sampling = SamplingParams(temperature=1.0, seed=i) if i % 3 == 0 else SamplingParams()
        requests.append(GenerationRequest(tuple(prompt), sampling, max_tokens=chance.randrange(1, 24), ignore_eos=True))
    return requests


def test_two_hundred_mixed_requests_with_aborts(engine: Engine, alone: Engine) -> None:
    requests = some_requests(200, seed=5)
    chance = random.Random(6)
    inboxes: list[queue.SimpleQueue[Event]] = []
    aborted = set()
    for i, request in enumerate(requests):
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        inboxes.append(inbox)
        ticket = engine.submit(request, inbox.put)
        if chance.random() < 0.3:
            aborted.add(i)
            if chance.random() < 0.5:
                inbox.put(inbox.get(timeout=60))  # after its first event
            ticket.cancel()
    answers = []
    for inbox in inboxes:
        events: list[Event] = []
        while not (events and isinstance(events[-1], Finished | Failed)):
            events.append(inbox.get(timeout=60))
        answers.append(events)
    for i, (request, events) in enumerate(zip(requests, answers, strict=True)):
        assert isinstance(events[-1], Finished)
        if i not in aborted:
            assert events[-1].reason == "length"
            assert tokens(events) == tokens(list(alone.generate(request)))
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_a_shared_beginning_is_computed_once(engine: Engine) -> None:
    system = list(range(1, 65))
    mine, yours = (*system, *[70] * 80), (*system, *[80] * 10)
    first = list(engine.generate(GenerationRequest(mine, max_tokens=2, ignore_eos=True)))
    other = list(engine.generate(GenerationRequest(yours, max_tokens=2, ignore_eos=True)))
    again = list(engine.generate(GenerationRequest((*mine, 9, 9), max_tokens=2, ignore_eos=True)))
    cached = [events[-1].usage.cached_tokens for events in (first, other, again) if isinstance(events[-1], Finished)]
    assert cached == [0, 64, 144]


def test_more_than_the_memory_can_hold_is_refused_with_the_number_that_fits(tiny_fp32: Package) -> None:
    runner = package_runner(tiny_fp32, slots=2, context=256)
    engine = Engine(runner, Tokenizer.load(tiny_fp32.folder), EngineConfig(kv_tokens=64))
    assert engine.context_length == 64
    with pytest.raises(Exception, match="64"):
        engine.submit(GenerationRequest(tuple(range(1, 65))), print)


def test_logprobs_of_answer_and_prompt(engine: Engine) -> None:
    prompt = tuple(range(1, 80))
    request = GenerationRequest(prompt, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    list(engine.generate(GenerationRequest(prompt, max_tokens=1)))  # what is cached must not be left out
    events = list(engine.generate(request))
    assert isinstance(events[0], PromptLogprobs)
    of_prompt = events[0].tokens
    assert of_prompt[0] is None
    assert [entry.chosen.token_id for entry in of_prompt[1:] if entry] == list(prompt[1:])
    entries = [entry for event in events if isinstance(event, Delta) for entry in event.logprobs]
    assert [entry.chosen.token_id for entry in entries] == list(tokens(events))
    for entry in entries:  # greedy
        assert entry.chosen == entry.top[0]
        assert entry.top[0].logprob >= entry.top[1].logprob
        assert entry.chosen.logprob < 0
    # The answer's first token, read as a part of the prompt, is as likely as it was when it was chosen.
    longer = GenerationRequest((*prompt, entries[0].chosen.token_id), max_tokens=1, prompt_logprobs=0)
    (reread, *_) = engine.generate(longer)
    assert isinstance(reread, PromptLogprobs)
    last = reread.tokens[-1]
    assert last is not None
    assert last.chosen.logprob == pytest.approx(entries[0].chosen.logprob, abs=1e-4)


def test_stop_tokens_and_kept_stop_strings(engine: Engine) -> None:
    plain = tokens(list(engine.generate(GenerationRequest((5, 6, 7), max_tokens=12, ignore_eos=True))))
    stop = frozenset({plain[4]})
    events = list(engine.generate(GenerationRequest((5, 6, 7), max_tokens=12, ignore_eos=True, stop_token_ids=stop)))
    assert tokens(events) == plain[: plain.index(plain[4])]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "stop"
