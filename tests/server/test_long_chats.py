"""Conversations longer than the context, and what `truncation` keeps of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from http_checks import CONTEXT, is_error
from openai.types.chat import ChatCompletion

from qwenonnx.server.config import ServeConfig

if TYPE_CHECKING:
    from serving_app import Running, Start

pytest_plugins = ["serving_app"]


def conversation(turns: int, size: int = 1) -> list[dict[str, Any]]:
    """A system prompt and so many turns, the last one open."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be short"}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn} " + "x " * size})
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    return messages[:-1]


def ask(running: Running, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    response = running.http.post("/v1/chat/completions", json={"messages": messages, **fields})
    assert response.status_code == 200, response.text
    ChatCompletion.model_validate_json(response.content, strict=True)
    answer: dict[str, Any] = response.json()
    return answer


def last(n: int) -> dict[str, Any]:
    return {"type": "last_turns", "n": n}


def test_the_system_prompt_and_the_last_turns_are_kept(start: Start) -> None:
    running = start()
    answer = ask(running, conversation(5), truncation=last(2))
    prompt = running.last_prompt()
    assert prompt.startswith("<|im_start|>system\nBe short<|im_end|>\n<|im_start|>user\nquestion 3 ")
    assert prompt.count("question") == 2
    assert answer["truncation"] == {"type": "last_turns", "n": 2, "dropped_turns": 3, "dropped_messages": 6}


def test_a_conversation_that_is_short_enough_stays_whole(start: Start) -> None:
    running = start()
    answer = ask(running, conversation(2), truncation=last(5))
    assert running.last_prompt().count("question") == 2
    assert answer["truncation"]["dropped_messages"] == 0


@pytest.mark.parametrize("fields", [{}, {"truncation": None}, {"truncation": "disabled"}])
def test_without_the_parameter_nothing_is_dropped_or_reported(start: Start, fields: dict[str, Any]) -> None:
    running = start()
    assert "truncation" not in ask(running, conversation(5), **fields)
    assert running.last_prompt().count("question") == 5


def test_more_is_dropped_where_the_last_turns_do_not_fit(start: Start) -> None:
    running = start(context_length=CONTEXT)
    messages = conversation(12, size=30)
    assert is_error(running.http.post("/v1/chat/completions", json={"messages": messages}), 400, param="messages")
    answer = ask(running, messages, truncation=last(10), max_tokens=5)
    kept = running.last_prompt().count("question")
    assert 1 < kept < 10
    assert answer["truncation"]["dropped_turns"] == 12 - kept
    assert "question 11" in running.last_prompt()
    # As many as fit: one more would not.
    whole = ask(running, messages, truncation=last(kept), max_tokens=5)["usage"]["prompt_tokens"]
    assert whole + whole // kept > CONTEXT - 5


def test_room_is_left_for_the_answer(start: Start) -> None:
    running = start("ab", end=False)
    answer = ask(running, conversation(40, size=10), truncation=last(40))
    assert answer["usage"]["completion_tokens"] >= CONTEXT // 4


def test_a_last_turn_that_does_not_fit_is_refused(start: Start) -> None:
    response = start().chat("x " * CONTEXT, truncation=last(1))
    assert is_error(response, 400, param="messages")
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_turn_is_kept_or_dropped_with_its_tool_results(start: Start) -> None:
    running = start()
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "Welcome"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "result one"},
        {"role": "developer", "content": "Later rule"},
        {"role": "user", "content": "second"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "result two"},
    ]
    answer = ask(running, messages, truncation=last(1))
    prompt = running.last_prompt()
    assert "result two" in prompt
    assert "second" in prompt
    assert "Later rule" in prompt
    assert not any(text in prompt for text in ("Welcome", "first", "result one"))
    assert answer["truncation"]["dropped_turns"] == 2
    assert answer["truncation"]["dropped_messages"] == 4


def test_the_server_can_be_told_to_do_it_for_all_requests(start: Start) -> None:
    running = start(config=ServeConfig(last_turns=1))
    assert ask(running, conversation(3))["truncation"]["dropped_turns"] == 2
    assert ask(running, conversation(3), truncation=last(2))["truncation"]["dropped_turns"] == 1
    assert "truncation" not in ask(running, conversation(3), truncation="disabled")


def test_streams_say_at_once_what_was_dropped(start: Start) -> None:
    running = start()
    body = {"messages": conversation(3), "truncation": last(1), "stream": True}
    frames = running.http.post("/v1/chat/completions", json=body).text.split("\n\n")
    assert json.loads(frames[0][6:])["truncation"]["dropped_turns"] == 2
    assert not any('"truncation"' in frame for frame in frames[1:])


def test_the_number_of_messages_is_limited(start: Start) -> None:
    running = start(config=ServeConfig(max_messages=10))
    messages = [{"role": "user", "content": "a"}] * 11
    for path in ("/v1/chat/completions", "/v1/chat/completions/input_tokens", "/tokenize"):
        response = running.http.post(path, json={"messages": messages})
        assert is_error(response, 400, param="messages")
        assert "at most 10" in response.json()["error"]["message"]
    assert running.http.post("/v1/chat/completions", json={"messages": messages[:10]}).status_code == 200
