"""POST /v1/completions as clients see it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from http_checks import CONTEXT, MODEL, is_error
from openai.types import Completion

if TYPE_CHECKING:
    from serving_app import Start

pytest_plugins = ["serving_app"]


def test_answer_has_the_text_and_validates_strictly(start: Start) -> None:
    response = start(" world").complete("Hello")
    answer = Completion.model_validate_json(response.content, strict=True)
    assert answer.choices[0].text == " world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_stream_says_what_the_whole_answer_says(start: Start) -> None:
    client = start("Hello, world!").client
    pieces = list(client.completions.create(model=MODEL, prompt="Hi", stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == "Hello, world!"
    assert pieces[-1].choices[0].finish_reason == "stop"
    assert len({piece.id for piece in pieces}) == 1


def test_stream_begins_at_once_with_a_comment(start: Start) -> None:
    text = start().complete(stream=True, stream_options={"include_usage": True}).text
    assert text.startswith(": keepalive\n\ndata: {")
    events = [json.loads(event[6:]) for event in text.split("\n\n")[1:-2]]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids"])
def test_forms_of_a_prompt(start: Start, form: str) -> None:
    running = start()
    text = "The quick brown fox"
    ids = running.tokenizer.encode(text)
    prompt: Any = {"text": text, "texts": [text], "ids": ids, "lists of ids": [ids]}[form]
    assert running.complete(prompt).json()["usage"]["prompt_tokens"] == len(ids)
    assert running.last_prompt() == text


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [""],
        ["a", ""],
        [[1], []],
        [[]],
        5,
        True,
        {"a": 1},
        [1.5],
        [True],
        [-1],
        [100_000],
        [[1], [100_000]],
        ["a", 1],
        ["a", [1]],
        ["a"] * 129,
    ],
)
def test_other_prompts_are_refused(start: Start, prompt: Any) -> None:
    running = start()
    assert is_error(running.complete(prompt), 400, param="prompt")
    assert running.runner.prefill_calls == []


def test_a_missing_prompt_is_refused(start: Start) -> None:
    assert is_error(start().http.post("/v1/completions", json={"model": MODEL}), 400, param="prompt")


def test_control_tokens_in_a_prompt_count_as_such(start: Start) -> None:
    running = start()
    assert running.complete("<|im_start|><|endoftext|>").json()["usage"]["prompt_tokens"] == 2


def test_sixteen_tokens_are_the_default(start: Start) -> None:
    running = start("ab", end=False)
    for fields in ({}, {"max_tokens": None}):
        assert running.complete(**fields).json()["usage"]["completion_tokens"] == 16
    assert running.complete(max_tokens=40).json()["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fills_the_context_is_refused_before_any_byte(start: Start, stream: bool) -> None:
    response = start().complete([5] * CONTEXT, stream=stream)
    assert is_error(response, 400, param="prompt")
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert f"at most {CONTEXT - 1}" in response.json()["error"]["message"]


def test_a_prompt_one_short_of_the_context_gets_one_token(start: Start) -> None:
    answer = start("ab", end=False).complete([5] * (CONTEXT - 1)).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
