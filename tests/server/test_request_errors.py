"""Requests that are at fault get OpenAI error objects, and the next request is served."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import openai
import pytest
from http_checks import MODEL, is_error

from qwenonnx.engine.config import EngineConfig
from qwenonnx.server.config import ServeConfig

if TYPE_CHECKING:
    from serving_app import Running, Start

pytest_plugins = ["serving_app"]


VALID = b'"messages":[{"role":"user","content":"Hi"}]'


def still_serves(running: Running) -> bool:
    return bool(running.chat().json()["choices"][0]["message"]["content"] == "Hello, world!")


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"[]", b'"x"', b"5", b"null", b"{", b"{'a':1}", b"\xff\xfe", b'{"a":"\xed\xa0\xbd"}', b"{} {}"],
)
def test_bodies_that_are_no_json_object(shared: Running, body: bytes) -> None:
    assert is_error(shared.raw(body), 400)
    assert still_serves(shared)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nothing", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("OPTIONS", "/v1/chat/completions", 405),
        ("GET", "/v1/models/gpt-4", 404),
    ],
)
def test_wrong_methods_and_paths(shared: Running, method: str, path: str, status: int) -> None:
    response = shared.http.request(method, path)
    assert is_error(response, status, param="model" if "gpt" in path else None)
    if status == 405:
        assert response.headers["allow"] in ("GET", "POST")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_unknown_model_is_not_found(shared: Running, path: str) -> None:
    body = {"model": "gpt-4", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    response = shared.http.post(path, json=body)
    assert is_error(response, 404, param="model")
    assert response.json()["error"]["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        shared.client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("model", [None, MODEL, "Qwen/Tiny"])
def test_names_of_the_served_model(shared: Running, model: str | None) -> None:
    response = shared.chat(model=model)
    assert response.status_code == 200
    assert response.json()["model"] == MODEL


WRONG: list[tuple[str, Any]] = [
    ("model", 5),
    ("model", ""),
    ("stream", "true"),
    ("stream", 1),
    ("temperature", True),
    ("temperature", "0"),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", "1"),
    ("top_p", 1.1),
    ("top_k", 1.5),
    ("top_k", -2),
    ("min_p", -1),
    ("repetition_penalty", 0),
    ("presence_penalty", 3),
    ("frequency_penalty", "0.5"),
    ("seed", "1"),
    ("seed", 2**64),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "10"),
    ("max_tokens", True),
    ("min_tokens", -1),
    ("logit_bias", []),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "1"}),
    ("logit_bias", {"99999": 1}),
    ("stream_options", True),
    ("stream_options", {"include_usage": "yes"}),
    ("ignore_eos", "no"),
    ("n", "2"),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("n", 1.5),
    ("best_of", 2),
    ("best_of", "1"),
    ("logprobs", "5"),
    ("logprobs", 21),
    ("top_logprobs", 5),
    ("top_logprobs", "5"),
    ("top_logprobs", 21),
    ("tools", {}),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "banana"),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "banana"}),
    ("echo", "yes"),
    ("suffix", "end"),
    ("suffix", 5),
    ("guided_json", {}),
    ("stop_token_ids", 5),
    ("stop_token_ids", ["5"]),
    ("stop_token_ids", [100_000]),
    ("stop_token_ids", list(range(65))),
    ("include_stop_str_in_output", 1),
    ("skip_special_tokens", False),
    ("timings", "yes"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_and_unsupported_values_are_refused_alike_on_both_endpoints(
    shared: Running, name: str, value: Any
) -> None:
    before = len(shared.runner.prefill_calls)
    status = 404 if (name, value) == ("model", "") else 400
    assert is_error(shared.chat(**{name: value}), status, param=name)
    assert is_error(shared.complete(**{name: value}), status, param=name)
    assert len(shared.runner.prefill_calls) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", 5),
        ("echo", True),
        ("chat_template_kwargs", []),
        ("chat_template_kwargs", {"messages": []}),
        ("truncation", "auto"),
        ("truncation", {"type": "last_turns"}),
        ("truncation", {"type": "last_turns", "n": 0}),
        ("truncation", {"type": "first_turns", "n": 1}),
    ],
)
def test_values_that_are_wrong_in_chat(shared: Running, name: str, value: Any) -> None:
    assert is_error(shared.chat(**{name: value}), 400, param=name)


@pytest.mark.parametrize(("name", "value"), [("logprobs", True), ("max_tokens", 0), ("top_logprobs", 2)])
def test_values_that_are_wrong_in_completions(shared: Running, name: str, value: Any) -> None:
    assert is_error(shared.complete(**{name: value}), 400, param=name)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": None, "temperature": None, "top_p": None, "top_k": None, "min_p": None, "seed": None},
        {"max_tokens": None, "stop": None, "logit_bias": None, "stream_options": None, "n": None},
        {"n": 1, "best_of": 1, "logprobs": False, "top_logprobs": None, "echo": False, "suffix": None},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"tools": None, "tool_choice": None, "response_format": None, "functions": None},
        {"user": "me", "metadata": {"a": 1}, "store": True, "made_up": [1], "parallel_tool_calls": True},
        {"top_k": -1, "top_p": 1, "min_p": 0, "temperature": 0, "seed": -1, "logit_bias": {"5": -100}},
        {"top_p": 0, "temperature": 1.5},
    ],
)
def test_null_neutral_and_unknown_fields_are_accepted(shared: Running, fields: dict[str, Any]) -> None:
    assert shared.chat(**fields).json()["choices"][0]["message"]["content"] == "Hello, world!"
    assert shared.complete(**fields).status_code == 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty", "logit_bias", "made_up"])
def test_numbers_that_are_not_finite(shared: Running, name: str, number: str) -> None:
    value = f'{{"5": {number}}}' if name == "logit_bias" else number
    body = b'{%s, "%s": %s}' % (VALID, name.encode(), value.encode())
    assert is_error(shared.raw(body), 400, param=name)
    assert still_serves(shared)


@pytest.mark.parametrize("number", [b"1" * 5000, b"1e400", b"-1e400"])
def test_huge_numbers_as_a_limit(shared: Running, number: bytes) -> None:
    response = shared.raw(b'{%s, "max_tokens": %s}' % (VALID, number))
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_a_huge_limit_in_scientific_notation_is_clamped(shared: Running) -> None:
    assert shared.raw(b'{%s, "max_tokens": 1e12}' % VALID).status_code == 200


@pytest.mark.parametrize("temperature", ["0", "0.0", "-0.0", "1e-9", "1e-45", "null"])
def test_temperatures_that_mean_the_most_probable_token(shared: Running, temperature: str) -> None:
    response = shared.raw(b'{%s, "temperature": %s}' % (VALID, temperature.encode()))
    assert response.json()["choices"][0]["message"]["content"] == "Hello, world!"


SURROGATES = [
    (b'{"messages":[{"role":"user","content":"a \\ud83d b"}]}', "messages"),
    (b'{"messages":[{"role":"user","content":[{"type":"text","text":"\\ude00"}]}]}', "messages"),
    (b'{%s,"stop":"\\ud83d"}' % VALID, "stop"),
    (b'{%s,"tools":[{"type":"function","function":{"name":"\\ud83d"}}]}' % VALID, "tools"),
    (b'{%s,"model":"\\ud83d"}' % VALID, "model"),
    (b'{%s,"x":{"\\ud83d":1}}' % VALID, "x"),
    (
        b'{"messages":[{"role":"assistant","tool_calls":[{"function":'
        b'{"name":"f","arguments":"{\\"a\\": \\"\\\\ud83d\\"}"}}]}]}',
        "messages",
    ),
]


@pytest.mark.parametrize(("body", "param"), SURROGATES)
@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_half_of_a_surrogate_pair(shared: Running, body: bytes, param: str, stream: bytes) -> None:
    assert is_error(shared.raw(b'{"stream":%s,' % stream + body[1:]), 400, param=param)
    assert still_serves(shared)


def test_a_surrogate_pair_is_a_character(shared: Running) -> None:
    assert shared.raw(b'{"messages":[{"role":"user","content":"\\ud83d\\ude00"}]}').status_code == 200
    assert "\U0001f600" in shared.last_prompt()


@pytest.mark.parametrize("depth", [100, 1_000, 10_000, 200_000])
@pytest.mark.parametrize("pair", [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting(shared: Running, depth: int, pair: tuple[bytes, bytes]) -> None:
    nested = pair[0] * depth + b"1" + pair[1] * depth
    assert shared.raw(b'{%s,"x":%s}' % (VALID, nested)).status_code == (200 if depth == 100 else 400)
    arguments = json.dumps("[" * depth + "]" * depth).encode()
    call = b'{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%s}}]}' % arguments
    assert shared.raw(b'{"messages":[%s]}' % call).status_code in (200, 400)
    assert still_serves(shared)


def test_duplicate_keys_do_no_harm(shared: Running) -> None:
    assert shared.raw(b'{%s,"max_tokens":1,"max_tokens":2}' % VALID).json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json"}, 200),
        ({"content-type": "Application/JSON; charset=utf-8"}, 200),
        ({"content-type": "application/vnd.api+json"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "identity"}, 200),
    ],
)
def test_kinds_of_bodies(shared: Running, headers: dict[str, str], status: int) -> None:
    response = shared.raw(b"{%s}" % VALID, **headers)
    assert response.status_code == status
    assert status == 200 or is_error(response, status)


def test_a_body_without_a_content_type_is_taken_for_json(shared: Running) -> None:
    assert shared.http.post("/v1/chat/completions", content=b"{%s}" % VALID).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("times", [2, 6])
def test_a_body_over_the_limit(start: Start, chunked: bool, times: int) -> None:
    running = start(config=ServeConfig(max_body=100_000))
    body = b"{%s}" % VALID + b" " * 100_000 * times
    content = (body[index : index + 50_000] for index in range(0, len(body), 50_000)) if chunked else body
    response = running.http.post("/v1/chat/completions", content=content)
    assert is_error(response, 413)
    assert "100000" in response.json()["error"]["message"]
    assert response.headers["connection"] == "close"
    assert still_serves(running)


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_a_body_announced_as_huge_is_refused_without_reading_it(shared: Running, expect: str) -> None:
    url = urlsplit(shared.url)
    head = f"POST {url.path}/v1/completions HTTP/1.1\r\nHost: x\r\n{expect}Content-Length: 10000000000\r\n\r\n"
    with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
        connection.sendall(head.encode() + (b"" if expect else b"{"))
        received = b""
        while data := connection.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b'"invalid_request_error"' in received
    assert still_serves(shared)


def test_a_slow_body_is_given_up(start: Start) -> None:
    running = start(config=ServeConfig(body_timeout=0.2))

    def trickle() -> Any:
        yield b"{"
        time.sleep(0.6)
        yield b"}"

    assert is_error(running.http.post("/v1/chat/completions", content=trickle()), 408)
    assert still_serves(running)


def test_a_full_queue_is_told_with_a_time_to_come_back(start: Start) -> None:
    running = start(engine_config=EngineConfig(max_queue=1))
    running.runner.hold()
    streams = []
    for _ in range(2):
        request = running.http.build_request("POST", "/v1/chat/completions", content=b'{"stream":true,%s}' % VALID)
        streams.append(running.http.send(request, stream=True))
        running.runner.entered.wait(10)
    response = running.chat(stream=True)
    assert is_error(response, 429)
    assert int(response.headers["retry-after"]) >= 0
    assert response.json()["error"]["type"] == "rate_limit_error"
    running.runner.release()
    for stream in streams:
        assert b"[DONE]" in stream.read()
        stream.close()
    assert still_serves(running)


def test_a_model_that_yields_nan_is_a_server_error_that_need_not_be_retried(start: Start) -> None:
    running = start(faults={1: "nan"})
    response = running.chat()
    assert is_error(response, 500)
    assert response.json()["error"]["type"] == "server_error"
    assert response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIError, match=r"NaN|nan|finite"):
        list(
            running.client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
            )
        )
    text = running.chat(stream=True).text
    assert text.endswith("data: [DONE]\n\n")
    *_, last, _ = text.removesuffix("\n\n").split("\n\n")
    assert set(json.loads(last.removeprefix("data: "))["error"]) == {"message", "type", "param", "code"}


def test_what_a_library_raises_stays_in_the_log(start: Start) -> None:
    running = start(faults={0: RuntimeError("secret detail")})
    for response in (running.chat(), running.chat(stream=True)):
        assert "secret" not in response.text
        assert "server_error" in response.text


def test_an_unforeseen_exception_is_an_error_object(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running = start()

    def broken(*_: object, **__: object) -> None:
        raise KeyError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(running.template, "encode", broken)
        response = running.chat()
        assert is_error(response, 500)
        assert "secret" not in response.text
    assert still_serves(running)
