"""Counting tokens, and turning text into them and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from http_checks import CONTEXT, is_error

from qwenonnx.server.config import ServeConfig

if TYPE_CHECKING:
    from serving_app import Running, Start

pytest_plugins = ["serving_app"]

USER = [{"role": "user", "content": "Hi"}]
TEXT = "The quick brown fox 😀 <|im_end|>"


def post(running: Running, path: str, **body: Any) -> dict[str, Any]:
    response = running.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("name", ["prompt", "content"])
def test_a_text_to_tokens_and_back(shared: Running, name: str) -> None:
    answer = post(shared, "/tokenize", **{name: TEXT})
    assert answer == {
        "count": len(answer["tokens"]),
        "max_model_len": CONTEXT,
        "tokens": shared.tokenizer.encode(TEXT),
    }
    assert post(shared, "/detokenize", tokens=answer["tokens"]) == {"prompt": TEXT, "content": TEXT}


def test_the_empty_text_has_no_tokens(shared: Running) -> None:
    assert post(shared, "/tokenize", prompt="")["tokens"] == []
    assert post(shared, "/detokenize", tokens=[])["prompt"] == ""


def test_control_tokens_can_be_taken_for_text(shared: Running) -> None:
    ids = post(shared, "/tokenize", content=TEXT, parse_special=False)["tokens"]
    assert ids == shared.tokenizer.encode_ordinary(TEXT)
    assert post(shared, "/detokenize", tokens=ids)["content"] == TEXT


def test_pieces_in_both_forms(shared: Running) -> None:
    ids = shared.tokenizer.encode("Hello you")
    pieces = [shared.tokenizer.decode([token_id]) for token_id in ids]
    assert post(shared, "/tokenize", prompt="Hello you", return_token_strs=True)["token_strs"] == pieces
    assert post(shared, "/tokenize", content="Hello you", with_pieces=True)["tokens"] == [
        {"id": token_id, "piece": piece} for token_id, piece in zip(ids, pieces, strict=True)
    ]


def test_a_conversation_to_tokens(shared: Running) -> None:
    assert post(shared, "/tokenize", messages=USER)["tokens"] == shared.template.encode(USER)
    closed = shared.template.encode(USER, add_generation_prompt=False)
    assert post(shared, "/tokenize", messages=USER, add_generation_prompt=False)["tokens"] == closed


def test_counting_tells_what_a_request_would_cost(shared: Running) -> None:
    usage = shared.chat().json()["usage"]
    answer = post(shared, "/v1/chat/completions/input_tokens", messages=USER, max_tokens=5, stream=True)
    assert answer["input_tokens"] == usage["prompt_tokens"]
    assert answer["max_model_len"] == CONTEXT


def test_counting_goes_beyond_the_context(shared: Running) -> None:
    messages = [{"role": "user", "content": "x " * CONTEXT}]
    answer = post(shared, "/v1/chat/completions/input_tokens", messages=messages)
    assert answer["input_tokens"] > CONTEXT


def test_counting_knows_what_truncation_leaves(start: Start) -> None:
    running = start(config=ServeConfig(last_turns=1))
    whole = post(running, "/v1/chat/completions/input_tokens", messages=USER * 5, truncation="disabled")
    cut = post(running, "/v1/chat/completions/input_tokens", messages=USER * 5)
    assert cut["input_tokens"] < whole["input_tokens"]
    assert cut["truncation"]["dropped_turns"] == 4


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": USER, "continue_final_message": True}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "5"}, "tokens"),
        ("/detokenize", {"tokens": [5.5]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
        ("/v1/chat/completions/input_tokens", {}, "messages"),
        ("/v1/chat/completions/input_tokens", {"messages": USER, "n": 0}, "n"),
    ],
)
def test_wrong_requests_are_refused(shared: Running, path: str, body: Any, param: str) -> None:
    assert is_error(shared.http.post(path, json=body), 400, param=param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/chat/completions/input_tokens"])
def test_another_model_is_not_found(shared: Running, path: str) -> None:
    body = {"model": "gpt-4", "prompt": "a", "tokens": [], "messages": USER}
    assert is_error(shared.http.post(path, json=body), 404, param="model")


def test_variables_of_the_template(start: Start, tiny_checkpoint: Any) -> None:
    from qwenonnx.text.chat_template import ChatTemplate

    running = start()
    source = "{{ messages[0].content }}{% if loud %}!{% endif %}{{ extra }}"
    template = ChatTemplate(source, running.tokenizer)
    running = start(template=template)
    running.chat(chat_template_kwargs={"loud": True, "extra": "<|im_end|>"})
    assert running.last_prompt() == "Hi!<|im_end|>"
    ids = template.encode(USER, variables={"extra": "<|im_end|>"})
    # What a request brings never becomes a control token.
    assert running.tokenizer.added_tokens["<|im_end|>"] not in ids
    running.chat(chat_template_kwargs=None)
    assert running.last_prompt() == "Hi"
