"""Completions with `echo`, with `suffix`, and other ways to end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from http_checks import is_error
from test_choices import pieces_by_index

from qwenonnx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from serving_app import Start

pytest_plugins = ["serving_app"]

FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|file_sep|>")


@pytest.fixture(scope="session")
def coder(tiny_checkpoint: Path) -> Tokenizer:
    """The tiny tokenizer with the tokens of Qwen2.5-Coder for filling gaps, which are added but not special."""
    full = tokenizers.Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    full.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in FIM])
    return Tokenizer(full, {})


@pytest.mark.parametrize("form", ["text", "ids"])
def test_a_suffix_makes_a_fill_in_the_middle_prompt(start: Start, coder: Tokenizer, form: str) -> None:
    running = start("return 1", tokenizer=coder)
    before, after = "def one():\n    ", "\n\nprint(one())"
    prompt: Any = before if form == "text" else coder.encode(before)
    answer = running.complete(prompt, suffix=after).json()
    assert answer["choices"][0]["text"] == "return 1"
    assert running.last_prompt() == f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"
    assert answer["usage"]["prompt_tokens"] == 3 + len(coder.encode(before)) + len(coder.encode(after))


def test_the_same_prompt_can_be_written_by_hand(start: Start, coder: Tokenizer) -> None:
    running = start("x", tokenizer=coder)
    stops = [f"stop {number}" for number in range(8)] + ["<|endoftext|>"]
    text = "<|fim_prefix|>def fib(n):<|fim_suffix|>    return x<|fim_middle|>"
    response = running.complete(text, stop=stops, temperature=0.01, max_tokens=64, stream=True)
    assert response.status_code == 200
    by_hand = running.runner.prefill_calls[-1][1]
    assert by_hand.count(coder.added_tokens["<|fim_prefix|>"]) == 1
    running.complete("def fib(n):", suffix="    return x")
    assert running.last_prompt() == text


def test_a_filling_ends_where_another_file_begins(start: Start, coder: Tokenizer) -> None:
    ids = [*coder.encode("return 1"), coder.added_tokens["<|file_sep|>"], *coder.encode("other")]
    choice = start(ids=ids, tokenizer=coder).complete("def one(): ", suffix="\n").json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("return 1", "stop")


@pytest.mark.parametrize("suffix", [None, ""])
def test_an_empty_suffix_is_none(start: Start, coder: Tokenizer, suffix: str | None) -> None:
    running = start(tokenizer=coder)
    assert running.complete("Hi", suffix=suffix).status_code == 200
    assert running.last_prompt() == "Hi"


def test_a_model_without_the_tokens_refuses_a_suffix(start: Start) -> None:
    response = start().complete("Hi", suffix="x")
    assert is_error(response, 400, param="suffix")
    assert response.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("prompt", ["Hello  wörld", "yếu", "<|im_start|>user"])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_gives_back_the_clients_own_text_first(start: Start, prompt: str, stream: bool) -> None:
    running = start(" and more")
    response = running.complete(prompt, echo=True, stream=stream)
    if stream:
        text = "".join(piece["text"] for piece in pieces_by_index(response.text)[0])
    else:
        text = response.json()["choices"][0]["text"]
    assert text == f"{prompt} and more"


def test_echo_of_token_ids_shows_control_tokens(start: Start) -> None:
    running = start(" x")
    ids = running.tokenizer.encode("<|im_start|>a")
    assert running.complete(ids, echo=True).json()["choices"][0]["text"] == "<|im_start|>a x"


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_but_an_echo_can_be_asked_for(start: Start, stream: bool) -> None:
    running = start("more")
    response = running.complete("Hi", echo=True, max_tokens=0, stream=stream)
    if stream:
        pieces = pieces_by_index(response.text)[0]
        assert [(piece["text"], piece["finish_reason"]) for piece in pieces] == [("Hi", None), ("", "length")]
        return
    answer = response.json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("Hi", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"]


def test_echo_and_suffix_exclude_each_other(start: Start, coder: Tokenizer) -> None:
    assert is_error(start(tokenizer=coder).complete("Hi", echo=True, suffix="x"), 400, param="echo")


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_stop_tokens_end_the_answer(start: Start, endpoint: str) -> None:
    running = start("one two three")
    ids = running.tokenizer.encode("one two three")
    send = running.chat if endpoint == "chat" else running.complete
    choice = send(stop_token_ids=[ids[-1]]).json()["choices"][0]
    text = choice["message"]["content"] if endpoint == "chat" else choice["text"]
    assert text == running.tokenizer.decode(ids[: ids.index(ids[-1])])
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_string_can_be_part_of_the_answer(start: Start, stream: bool) -> None:
    running = start("The quick brown fox jumps")
    response = running.complete(stop=["own fox"], include_stop_str_in_output=True, max_tokens=99, stream=stream)
    pieces = pieces_by_index(response.text)[0] if stream else response.json()["choices"]
    assert "".join(piece["text"] for piece in pieces) == "The quick brown fox"
    assert pieces[-1]["finish_reason"] == "stop"
