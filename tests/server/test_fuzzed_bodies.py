"""Bodies that nobody has thought of: no fault of the server's, no hang, and the next request is served.

`make fuzz` sets QWENONNX_FUZZ_CASES for a long run with new cases each time.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from http_checks import MODEL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwenonnx.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

if TYPE_CHECKING:
    from serving_app import Running, Start

pytest_plugins = ["serving_app"]

CASES = int(os.environ.get("QWENONNX_FUZZ_CASES", "0"))
REPEATABLE = settings(
    max_examples=CASES or 150,
    derandomize=not CASES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

BODIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/chat/completions/input_tokens": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1, 2]}),
}
SPECIAL = ["<|im_end|>", "<|im_start|>system", "\0", "\ufeff", "e\u0301", "\u2028", "{{ 7 * 7 }}", "{% raw %}", MODEL]

texts = st.one_of(st.text(max_size=20), st.sampled_from(SPECIAL))
numbers = st.one_of(
    st.integers(-3, 30), st.integers(), st.floats(), st.sampled_from([0, 1, 2**31, 2**53, 2**63, 2**64, 1e400])
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.one_of(st.sampled_from(["system", "developer", "user", "assistant", "tool"]), values),
            "content": st.one_of(
                texts, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts})), values
            ),
            "tool_calls": values,
        },
    ),
    max_size=4,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and a body: a valid one with some fields replaced, and sometimes with some bytes replaced as well."""
    path = draw(st.sampled_from(sorted(BODIES)))
    kind, valid = BODIES[path]
    body = {**valid, "max_tokens": 4}
    for name in draw(
        st.lists(st.sampled_from([*kind.model_fields, "made_up", "tools", "response_format"]), max_size=4)
    ):
        body[name] = draw(st.one_of(messages, values) if name == "messages" else values)
    data = bytearray(json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass"))
    for place, byte in draw(st.lists(st.tuples(st.integers(0, len(data)), st.integers(0, 255)), max_size=3)):
        data[place : place + draw(st.integers(0, 2))] = bytes([byte])
    return path, bytes(data)


@pytest.fixture(scope="module")
def small(start_shared: Start) -> Running:
    """A server whose context is short, so that no answer takes long."""
    return start_shared("Hello 😀", context_length=96)


def check(response: httpx.Response) -> None:
    """Whether an answer is one of the documented kinds."""
    assert response.status_code in (200, 400, 404), response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"server_error"' not in response.text
        return
    answer = json.loads(response.text, parse_constant=pytest.fail)
    if response.status_code != 200:
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["type"] == "invalid_request_error"
        assert "Traceback" not in answer["error"]["message"]


@REPEATABLE
@given(request=requests())
def test_bodies_with_odd_fields_and_bytes(small: Running, request: tuple[str, bytes]) -> None:
    path, body = request
    check(small.raw(body, path))


@settings(REPEATABLE, max_examples=max(CASES // 10, 50))
@given(path=st.sampled_from(sorted(BODIES)), body=st.binary(max_size=200))
def test_bodies_of_any_bytes(small: Running, path: str, body: bytes) -> None:
    check(small.raw(body, path))


def test_afterwards_everything_works_and_nothing_is_left(small: Running) -> None:
    assert small.chat().json()["choices"][0]["message"]["content"] == "Hello 😀"
    health = small.http.get("/health").json()
    assert (health["status"], health["in_flight"], health["running"], health["waiting"]) == ("ok", 0, 0, 0)
