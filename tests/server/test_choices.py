"""Several choices in one answer: n, and several prompts."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from http_checks import MODEL, is_error, wait_until
from openai.types import Completion
from openai.types.chat import ChatCompletion
from test_running import connect

from qwenonnx.engine.config import EngineConfig
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.generation import PARALLEL
from qwenonnx.server.prepare import prepare_chat, prepare_completion

if TYPE_CHECKING:
    from serving_app import Start

pytest_plugins = ["serving_app"]

USER: Any = [{"role": "user", "content": "Hi"}]


def pieces_by_index(text: str) -> dict[int, list[dict[str, Any]]]:
    """The choices in the frames of a stream, by index."""
    result: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in text.split("\n\n"):
        if event.startswith("data: {"):
            for choice in json.loads(event[6:])["choices"]:
                result[choice["index"]].append(choice)
    return result


def test_n_choices_have_their_indexes_and_the_prompt_counts_once(start: Start) -> None:
    running = start("Hello you")
    one = running.chat().json()["usage"]
    response = running.chat(n=3)
    answer = ChatCompletion.model_validate_json(response.content, strict=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"Hello you"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == one["prompt_tokens"]
    assert answer.usage.completion_tokens == 3 * one["completion_tokens"]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_n_choices_in_a_stream(start: Start, endpoint: str) -> None:
    running = start("Hello you")
    options = {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    text = (running.chat(**options) if endpoint == "chat" else running.complete(**options)).text
    choices = pieces_by_index(text)
    assert sorted(choices) == [0, 1, 2]
    for pieces in choices.values():
        said = [piece["delta"].get("content", "") if endpoint == "chat" else piece["text"] for piece in pieces]
        assert "".join(said) == "Hello you"
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
        if endpoint == "chat":
            assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
    usage = json.loads(text.split("\n\n")[-3][6:])["usage"]
    assert usage["completion_tokens"] == 3 * len(running.tokenizer.encode("Hello you"))
    assert text.count("[DONE]") == 1


def test_choices_have_seeds_of_their_own(start: Start) -> None:
    served = start().service.served
    for prepare, body in ((prepare_chat, {"messages": USER}), (prepare_completion, {"prompt": ["a", "b"]})):
        prepared = prepare(json.dumps({**body, "seed": 2**64 - 1, "n": 3}).encode(), served, ServeConfig())
        seeds = [request.sampling.seed for request in prepared.requests]
        # As if each prompt had been sent alone.
        assert seeds == [2**64 - 1, 0, 1] * (len(seeds) // 3)
        assert {
            request.sampling.seed
            for request in prepare(json.dumps({**body, "n": 2}).encode(), served, ServeConfig()).requests
        } == {None}


@pytest.mark.parametrize("form", ["texts", "ids"])
def test_several_prompts(start: Start, form: str) -> None:
    running = start(say=lambda prompt: f"{prompt} is what you said")
    prompts = ["one", "two", "three"]
    sent: Any = prompts if form == "texts" else [running.tokenizer.encode(prompt) for prompt in prompts]
    response = running.complete(sent, max_tokens=99, n=2)
    answer = Completion.model_validate_json(response.content, strict=True)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [f"{prompts[i // 2]} is what you said" for i in range(6)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(running.tokenizer.encode(prompt)) for prompt in prompts)
    choices = pieces_by_index(running.complete(sent, max_tokens=99, n=2, stream=True).text)
    said = ["".join(piece["text"] for piece in choices[index]) for index in range(6)]
    assert said == [choice.text for choice in answer.choices]


def test_more_choices_than_may_run_or_wait_are_all_answered(start: Start) -> None:
    running = start(say=lambda prompt: prompt[::-1], engine_config=EngineConfig(max_queue=1))
    prompts = [f"number {index}" for index in range(3 * PARALLEL)]
    answer = running.complete(prompts, max_tokens=99).json()
    assert [choice["text"] for choice in answer["choices"]] == [prompt[::-1] for prompt in prompts]


def test_a_long_list_of_prompts_leaves_room_in_the_queue_for_others(start: Start) -> None:
    running = start()
    running.runner.hold()
    engine = running.service.served.engine
    with connect(running, stream=True, extra={"n": 100}):
        wait_until(lambda: engine.num_running + engine.num_waiting == PARALLEL)
        assert running.service.in_flight == 1
    wait_until(lambda: engine.num_running + engine.num_waiting == 0 and running.service.in_flight == 0)
    running.runner.release()
    assert running.chat().status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_ends_all_choices(start: Start, stream: bool) -> None:
    running = start("word ", end=False, context_length=100_000, delay=0.002)
    with connect(running, stream=stream, extra={"n": 4}):
        wait_until(lambda: len(running.runner.decode_calls) > 3)
    engine = running.service.served.engine
    wait_until(lambda: running.service.in_flight == engine.num_running == engine.num_waiting == 0)
    assert running.chat(max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_choice_that_fails_fails_the_answer_and_ends_the_others(start: Start, stream: bool) -> None:
    running = start(faults={1: "nan"})
    response = running.chat(n=3, stream=stream)
    assert '"server_error"' in response.text.replace('": "', '":"')
    assert stream or is_error(response, 500)
    engine = running.service.served.engine
    wait_until(lambda: running.service.in_flight == engine.num_running == engine.num_waiting == 0)


def test_limits_of_choices(start: Start) -> None:
    running = start("x")
    assert is_error(running.complete(["a"] * 65, n=2), 400, param="n")
    assert is_error(running.chat(n=129), 400, param="n")
    assert is_error(running.chat(n=2, best_of=3), 400, param="best_of")
    assert len(running.chat(n=2, best_of=2, max_tokens=1).json()["choices"]) == 2
    assert len(running.complete(["a"] * 128, max_tokens=1).json()["choices"]) == 128


def test_one_prompt_that_is_wrong_is_found_before_any_runs(start: Start) -> None:
    running = start()
    assert is_error(running.complete(["fine"] * 20 + ["x " * 600], stream=True), 400, param="prompt")
    assert running.runner.prefill_calls == []


def test_the_client_reads_choices_by_their_index(start: Start) -> None:
    client = start("Hello you").client
    said: dict[int, str] = defaultdict(str)
    for chunk in client.chat.completions.create(model=MODEL, messages=USER, n=2, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == {0: "Hello you", 1: "Hello you"}
