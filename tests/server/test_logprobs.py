"""Log-probabilities: which text they belong to, and their form at both endpoints."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from http_checks import MODEL, is_error
from openai.types import Completion
from openai.types.chat import ChatCompletion
from test_choices import pieces_by_index

from qwenonnx.engine.request import Delta, Finished, PromptLogprobs, Timings, TokenLogprob, TokenLogprobs, Usage
from qwenonnx.server.choices import Choice, ChoiceRules
from qwenonnx.server.logprobs import LOWEST, PlacedToken, chat_logprobs, completion_logprobs
from qwenonnx.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from serving_app import Start

pytest_plugins = ["serving_app"]

TEXTS = ["Hello, world!", "😀 and 赋", " leading", "👨‍👩‍👧‍👦"]


def chosen(tokenizer: Tokenizer) -> float:
    """What the scripted model gives a token of its script; all others that exist share the rest."""
    return 10 - math.log(math.exp(10) + tokenizer.num_tokens - 1)


def entry(token_id: int, logprob: float = -0.5) -> TokenLogprobs:
    token = TokenLogprob(token_id, logprob)
    return TokenLogprobs(token, (token,))


def delta(text: str, *ids: int) -> Delta:
    return Delta(text, ids, tuple(entry(token_id) for token_id in ids))


def finished(reason: Any = "stop") -> Finished:
    return Finished(reason, Usage(1, 1), Timings(0, 0, 0))


def token_ids(tokens: tuple[PlacedToken, ...]) -> list[int]:
    return [token.token_id for token in tokens]


def test_tokens_wait_for_the_text_they_spell(tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode("😀")
    (letter,) = tokenizer.encode("a")
    choice = Choice(ChoiceRules(tokenizer=tokenizer))
    assert choice.feed(delta("", first)) is None
    for token_id in rest[:-1]:
        assert choice.feed(delta("", token_id)) is None
    piece = choice.feed(delta("😀", rest[-1]))
    assert piece is not None
    assert token_ids(piece.tokens) == [first, *rest]
    piece = choice.feed(delta("a", letter))
    assert piece is not None
    assert [(token.token_id, token.start) for token in piece.tokens] == [(letter, 1)]


def test_tokens_that_a_stop_string_cuts_off_are_not_told(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    choice = Choice(ChoiceRules(tokenizer=tokenizer))
    choice.feed(delta("a", a))
    choice.feed(delta("", b))
    choice.feed(delta("", c))
    assert choice.feed(finished()) is None
    assert token_ids(choice.whole("stop").tokens) == [a]


def test_tokens_without_text_are_told_at_the_limit(tokenizer: Tokenizer) -> None:
    (letter,) = tokenizer.encode("a")
    end = tokenizer.added_tokens["<|endoftext|>"]
    choice = Choice(ChoiceRules(tokenizer=tokenizer))
    assert choice.feed(delta("", end)) is None
    piece = choice.feed(delta("a", letter))
    assert piece is not None
    assert token_ids(piece.tokens) == [end, letter]
    assert choice.feed(delta("", end)) is None
    piece = choice.feed(finished("length"))
    assert piece is not None
    assert (piece.text, token_ids(piece.tokens)) == ("", [end])
    (shown,) = chat_logprobs(piece.tokens, tokenizer)["content"]
    assert (shown["token"], shown["bytes"]) == ("<|endoftext|>", [])


def test_bytes_of_a_character_that_was_never_complete_are_told(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("😀")[0]
    choice = Choice(ChoiceRules(tokenizer=tokenizer))
    choice.feed(delta("\ufffd", first))
    choice.feed(finished("length"))
    assert token_ids(choice.whole("length").tokens) == [first]


def test_a_token_that_cannot_come_has_a_finite_number(tokenizer: Tokenizer) -> None:
    tokens = [PlacedToken(5, 0, entry(5, -math.inf))]
    assert chat_logprobs(tokens, tokenizer)["content"][0]["logprob"] == LOWEST
    assert completion_logprobs(tokens, tokenizer)["token_logprobs"] == [LOWEST]


def test_parts_of_characters_are_told_apart_in_completions(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("😀")
    choice = Choice(ChoiceRules(tokenizer=tokenizer))
    choice.feed(delta("😀", *ids))
    told = completion_logprobs(choice.whole("stop").tokens, tokenizer)
    assert "".join(text.removeprefix("bytes:") for text in told["tokens"]) == r"\xf0\x9f\x98\x80"
    assert told["text_offset"] == [0] * len(ids)


def test_an_echoed_prompt_comes_with_its_own(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    choice = Choice(ChoiceRules(echo="ab", prompt_ids=(a, b), tokenizer=tokenizer))
    assert choice.feed(PromptLogprobs((None, entry(b)))) is None
    choice.feed(delta("c", c))
    whole = choice.whole("stop")
    assert whole.text == "abc"
    assert completion_logprobs(whole.tokens, tokenizer) == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -0.5, -0.5],
        "top_logprobs": [None, {"b": -0.5}, {"c": -0.5}],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_spell_the_answer(start: Start, text: str, stream: bool) -> None:
    running = start(text)
    response = running.chat(logprobs=True, top_logprobs=3, stream=stream)
    if stream:
        pieces = pieces_by_index(response.text)[0]
        content = [token for piece in pieces if piece["logprobs"] for token in piece["logprobs"]["content"]]
        for piece in pieces[1:-1]:
            spelled = b"".join(bytes(token["bytes"]) for token in piece["logprobs"]["content"])
            assert spelled.decode() == piece["delta"]["content"]
    else:
        answer = ChatCompletion.model_validate_json(response.content, strict=True)
        assert answer.choices[0].logprobs is not None
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == text
    assert len(content) == len(running.tokenizer.encode(text))
    for token in content:
        assert token["logprob"] == pytest.approx(chosen(running.tokenizer), abs=1e-4)
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["logprob"] == token["logprob"]
        assert all(first["logprob"] >= second["logprob"] for first, second in pairwise(token["top_logprobs"]))
        assert all(other["logprob"] <= 0 for other in token["top_logprobs"])


def test_logprobs_without_alternatives_and_none_at_all(start: Start) -> None:
    running = start("Hello")
    content = running.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert content
    assert all(token["top_logprobs"] == [] for token in content)
    assert running.chat().json()["choices"][0]["logprobs"] is None
    assert running.chat(logprobs=False, top_logprobs=0).json()["choices"][0]["logprobs"] is None
    assert is_error(running.chat(top_logprobs=2), 400, param="top_logprobs")
    assert is_error(running.chat(logprobs=False, top_logprobs=2), 400, param="top_logprobs")


@pytest.mark.parametrize("fields", [{"logit_bias": {"5": -100}}, {"top_k": 1}, {"temperature": 2, "seed": 1}])
def test_logprobs_are_valid_json_whatever_the_sampling(start: Start, fields: dict[str, Any]) -> None:
    response = start("Hello you").chat(logprobs=True, top_logprobs=20, max_tokens=8, **fields)
    assert response.status_code == 200
    json.loads(response.text, parse_constant=pytest.fail)
    for token in response.json()["choices"][0]["logprobs"]["content"]:
        assert all(LOWEST <= other["logprob"] <= 0 for other in token["top_logprobs"])


def test_tokens_of_a_stop_string_are_not_told(start: Start) -> None:
    running = start("The quick brown fox jumps")
    choice = running.chat(stop=["own fox"], logprobs=True).json()["choices"][0]
    spelled = b"".join(bytes(token["bytes"]) for token in choice["logprobs"]["content"]).decode()
    assert choice["message"]["content"] == "The quick br"
    assert spelled.startswith("The quick br")
    last = len(bytes(choice["logprobs"]["content"][-1]["bytes"]))
    assert len(spelled) - last < len("The quick br")


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs(start: Start, stream: bool) -> None:
    running = start("Hello you")
    response = running.complete(logprobs=2, stream=stream)
    if stream:
        pieces = [piece["logprobs"] for piece in pieces_by_index(response.text)[0] if piece["logprobs"]]
        told = {name: [item for piece in pieces for item in piece[name]] for name in pieces[0]}
    else:
        answer = Completion.model_validate_json(response.content, strict=True)
        assert answer.choices[0].logprobs is not None
        told = response.json()["choices"][0]["logprobs"]
    assert "".join(told["tokens"]) == "Hello you"
    assert told["text_offset"] == [len("".join(told["tokens"][:index])) for index in range(len(told["tokens"]))]
    assert told["token_logprobs"] == pytest.approx([chosen(running.tokenizer)] * len(told["tokens"]), abs=1e-4)
    for token, best in zip(told["tokens"], told["top_logprobs"], strict=True):
        assert best[token] == max(best.values())
        assert 2 <= len(best) <= 3


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_a_text(start: Start, stream: bool) -> None:
    running = start("more")
    response = running.complete("Hello you", echo=True, logprobs=1, max_tokens=0, stream=stream)
    choice = pieces_by_index(response.text)[0][0] if stream else response.json()["choices"][0]
    told = choice["logprobs"]
    assert choice["text"] == "".join(told["tokens"]) == "Hello you"
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert all(-20 < logprob <= 0 for logprob in told["token_logprobs"][1:])


def test_the_client_reads_both_forms(start: Start) -> None:
    client = start("Hello").client
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert "".join(token.token for token in chat.choices[0].logprobs.content) == "Hello"
    completion = client.completions.create(model=MODEL, prompt="Hi", logprobs=2)
    assert completion.choices[0].logprobs is not None
    assert "".join(completion.choices[0].logprobs.tokens or []) == "Hello"
