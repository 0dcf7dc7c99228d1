"""The engine on the real weights: many requests at once, growing chats, long prompts, and what stays behind."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwenonnx.bench.soak import soak
from qwenonnx.bench.turns import measure_turns
from qwenonnx.engine.config import EngineConfig
from qwenonnx.engine.load import LoadedModel, load_model
from qwenonnx.engine.request import Delta, Event, Failed, Finished, GenerationRequest
from qwenonnx.engine.sampling import SamplingParams
from qwenonnx.errors import ContextLengthError
from qwenonnx.package.package import Package
from qwenonnx.runtime.load import session_config

pytestmark = pytest.mark.model

STREAMS = 16


@pytest.fixture(scope="module")
def int8(model_checkpoint: Path) -> Package:
    return Package.open(model_checkpoint.parents[1] / "int8")


@pytest.fixture(scope="module")
def model(int8: Package) -> Iterator[LoadedModel]:
    config = EngineConfig(prefill_chunk=96, max_running=STREAMS, max_queue=1000)
    model = load_model(int8, session_config(), engine=config, check=False)
    model.engine.start()
    yield model
    model.engine.close()


def tokens(events: list[Event]) -> list[int]:
    return [token_id for event in events if isinstance(event, Delta) for token_id in event.token_ids]


def test_sixteen_streams_with_aborts_answer_as_each_alone(model: LoadedModel) -> None:
    chance = random.Random(4)
    beginnings = [[chance.randrange(150_000) for _ in range(60)] for _ in range(3)]
    requests = []
    for i in range(40):
        prompt = chance.choice(beginnings)[: chance.randrange(60)]
        prompt = prompt + [chance.randrange(150_000) for _ in range(chance.randrange(1, 90))]
        sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=i) if i % 4 == 0 else SamplingParams()
        requests.append(GenerationRequest(tuple(prompt), sampling, max_tokens=chance.randrange(1, 24), ignore_eos=True))
    inboxes: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in requests]
    aborted = set(chance.sample(range(40), 12))
    for i, (request, inbox) in enumerate(zip(requests, inboxes, strict=True)):
        ticket = model.engine.submit(request, inbox.put)
        if i in aborted:
            threading.Timer(chance.random() * 4, ticket.cancel).start()
    together = []
    for inbox in inboxes:
        events: list[Event] = []
        while not (events and isinstance(events[-1], Finished | Failed)):
            events.append(inbox.get())
        together.append(tokens(events))
    alone = load_model(model.package, session_config(), engine=EngineConfig.for_one(), check=False)
    alone.engine.start()
    try:
        for i, request in enumerate(requests):
            if i not in aborted:
                assert tokens(list(alone.engine.generate(request))) == together[i]
    finally:
        alone.engine.close()


def test_a_growing_chat_runs_only_what_is_new(model: LoadedModel) -> None:
    turns = measure_turns(model.engine, 151_665, turns=5, turn_tokens=50, new_tokens=4, repeats=1)
    assert [entry.prompt_tokens - entry.cached_tokens for entry in turns] == [50, 51, 51, 51, 51]


def test_a_soak_leaves_nothing_behind(model: LoadedModel) -> None:
    report = soak(model.engine, 151_665, requests=48, streams=STREAMS)
    assert (report.failed, report.differing, report.left_over, report.threads_left_over) == (0, 0, 0, 0)


def test_a_long_prompt_can_be_cancelled_and_one_too_long_is_refused(model: LoadedModel) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    ticket = model.engine.submit(GenerationRequest(tuple(range(32_000)), max_tokens=8), events.put)
    while not model.engine.num_running:
        threading.Event().wait(0.01)
    ticket.cancel()
    last = events.get()
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"
    with pytest.raises(ContextLengthError, match=r"(?s)32768.*40000"):
        model.engine.submit(GenerationRequest((1,) * 40_000), events.put)


def test_prefixes_survive_on_disk(int8: Package, tmp_path: Path) -> None:
    prompt = tuple(range(1000, 1300))
    answers = []
    for _ in range(2):
        model = load_model(
            int8, session_config(), engine=EngineConfig.for_one(), check=False, prefix_folder=tmp_path / "prefixes"
        )
        model.engine.start()
        try:
            events = list(model.engine.generate(GenerationRequest(prompt, max_tokens=8, ignore_eos=True)))
        finally:
            model.engine.close()
        assert isinstance(events[-1], Finished)
        answers.append((tokens(events), events[-1].usage.cached_tokens))
    assert answers[0][0] == answers[1][0]
    assert [cached for _, cached in answers] == [0, 298]
