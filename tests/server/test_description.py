"""The OpenAPI document and the page that shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator

from qwenonnx.errors import InvalidRequestError
from qwenonnx.server.schema import Body, ChatRequest, CompletionRequest, parse_fields

if TYPE_CHECKING:
    from serving_app import Running

pytest_plugins = ["serving_app"]

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def document(shared: Running) -> dict[str, Any]:
    answer: dict[str, Any] = shared.http.get("/openapi.json").json()
    return answer


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for child in value.values():
            yield from references(child)
    elif isinstance(value, list):
        for child in value:
            yield from references(child)


def test_all_endpoints_are_described_and_nothing_else(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/chat/completions/input_tokens",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model_id}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/version",
    }


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    found = set(references(document))
    assert "#/components/schemas/ChatRequest" in found
    for reference in found:
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def test_statuses_that_cannot_be_are_not_described(document: dict[str, Any]) -> None:
    statuses = {
        status
        for methods in document["paths"].values()
        for operation in methods.values()
        for status in operation["responses"]
    }
    assert statuses == {"200", "400", "401", "404", "408", "413", "415", "429", "500", "503"}


CHAT: list[dict[str, Any]] = [
    {},
    {"stop": "a"},
    {"stop": ["a", "b"]},
    {"stop": 5},
    {"stop": [5]},
    {"stop": None},
    {"n": 2},
    {"n": 0},
    {"n": 129},
    {"n": "2"},
    {"logit_bias": {"5": 1}},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"5": 101}},
    {"logit_bias": []},
    {"tools": []},
    {"tools": [{}]},
    {"tool_choice": "none"},
    {"tool_choice": "required"},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"truncation": {"type": "last_turns", "n": 3}},
    {"truncation": {"type": "last_turns"}},
    {"truncation": "disabled"},
    {"truncation": "auto"},
    {"temperature": 2},
    {"temperature": 2.1},
    {"temperature": "1"},
    {"max_tokens": 0},
    {"logprobs": True, "top_logprobs": 20},
    {"logprobs": True, "top_logprobs": 21},
    {"logprobs": 5},
    {"stop_token_ids": [5]},
    {"stop_token_ids": ["5"]},
    {"made_up": {"a": [1]}},
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "banana", "content": "a"}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"prompt": "a"},
    {"prompt": ""},
    {"prompt": ["a", "b"]},
    {"prompt": [1, 2]},
    {"prompt": [[1], [2]]},
    {"prompt": [1, "a"]},
    {"prompt": 5},
    {"prompt": "a", "logprobs": 3},
    {"prompt": "a", "logprobs": False},
    {"prompt": "a", "logprobs": True},
    {"prompt": "a", "logprobs": 21},
    {"prompt": "a", "echo": True, "max_tokens": 0},
    {"prompt": "a", "suffix": 5},
    {"prompt": "a", "tools": [{}]},
]
CASES: list[tuple[type[Body], dict[str, Any]]] = [
    *((ChatRequest, {"messages": MESSAGES, **fields}) for fields in CHAT),
    *((CompletionRequest, fields) for fields in COMPLETIONS),
]


@pytest.mark.parametrize(
    ("kind", "body"), CASES, ids=lambda value: json.dumps(value) if isinstance(value, dict) else ""
)
def test_the_schema_takes_what_the_server_takes(
    document: dict[str, Any], kind: type[Body], body: dict[str, Any]
) -> None:
    schema = {**document, "$ref": f"#/components/schemas/{kind.__name__}"}
    try:
        parse_fields(kind, body)
    except InvalidRequestError:
        taken = False
    else:
        taken = True
    empty = body.get("prompt") == ""  # found empty only once it is tokens
    assert Draft202012Validator(schema).is_valid(body) is (taken and not empty)


class Links(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        assert tag not in ("script", "iframe", "object", "embed")


def test_the_page_of_the_description_fetches_nothing_from_elsewhere(shared: Running) -> None:
    response = shared.http.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    links = Links()
    links.feed(response.text)
    assert links.found == ["openapi.json"]
    assert not re.search(r"https?://|url\(|@import", response.text)
    assert "default-src 'none'" in response.headers["content-security-policy"]


def test_the_page_shows_fields_and_statuses(shared: Running) -> None:
    text = shared.http.get("/docs").text
    for shown in ("POST /v1/chat/completions", "repetition_penalty", "number 0.01..10", "<td>429</td>", "required"):
        assert shown in text
