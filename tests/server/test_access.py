"""Keys, CORS, request ids and the small endpoints."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from http_checks import CONTEXT, MODEL, is_error
from starlette.types import Message, Receive, Scope, Send

import qwenonnx
from qwenonnx.errors import UsageError
from qwenonnx.server.access import RateLimit, read_keys
from qwenonnx.server.config import ServeConfig

if TYPE_CHECKING:
    from serving_app import Start

pytest_plugins = ["serving_app"]


ORIGIN = "https://app.example"
SECURED = ServeConfig(api_keys=("first-key", "schlüssel"), cors_origins=(ORIGIN,))
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def test_a_preflight_needs_no_key(start: Start) -> None:
    response = start(config=SECURED).http.options(
        "/v1/chat/completions",
        headers={
            "origin": ORIGIN,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        },
    )
    assert response.status_code in (200, 204)
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert "POST" in response.headers["access-control-allow-methods"]


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer wrong",
        b"Basic first-key",
        b"first-key",
        b"Bearer \xff\xfe",
        b"Bearer first-key x",
    ],
)
def test_without_a_right_key_nothing_is_served(start: Start, authorization: bytes | None) -> None:
    headers: list[tuple[bytes, bytes]] = [(b"origin", ORIGIN.encode())]
    if authorization is not None:
        headers.append((b"authorization", authorization))
    running = start(config=SECURED)
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = running.http.post(path, json=BODY, headers=headers)
        assert is_error(response, 401)
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["access-control-allow-origin"] == ORIGIN
    assert is_error(running.http.get("/v1/models", headers=headers), 401)
    assert running.http.get("/health").status_code == 200


@pytest.mark.parametrize("authorization", ["Bearer first-key", "bearer first-key", "BEARER  schlüssel"])
def test_every_key_opens(start: Start, authorization: str) -> None:
    response = start(config=SECURED).http.post(
        "/v1/chat/completions", json=BODY, headers={b"authorization": authorization.encode()}
    )
    assert response.status_code == 200


def test_keys_work_with_the_openai_client(start: Start) -> None:
    assert start(config=SECURED, api_key="first-key").client.models.list().data[0].id == MODEL
    with pytest.raises(openai.AuthenticationError):
        start(config=SECURED, api_key="other").client.models.list()


def test_cors_is_off_by_default(start: Start) -> None:
    response = start().http.post("/v1/chat/completions", json=BODY, headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in response.headers


def test_other_origins_are_not_allowed(start: Start) -> None:
    response = start(config=SECURED).http.get("/health", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in response.headers


def request_id(response: httpx.Response) -> str:
    return response.headers["x-request-id"]


def test_a_sane_request_id_is_kept(start: Start) -> None:
    http = start().http
    assert request_id(http.get("/health", headers={"x-request-id": "trace-1.a_B"})) == "trace-1.a_B"
    for given in ("", "a b", "x" * 200, "a\tb"):
        made = request_id(http.get("/nothing", headers={"x-request-id": given}))
        assert made.startswith("req_")
    assert request_id(http.get("/health")) != request_id(http.get("/health"))


def test_models(start: Start) -> None:
    client = start().client
    (model,) = client.models.list().data
    assert (model.id, model.object, model.created, model.owned_by) == (MODEL, "model", 1_700_000_000, "qwenonnx")
    assert client.models.retrieve(MODEL).id == MODEL
    assert client.models.retrieve("Qwen/Tiny").id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_health_and_version(start: Start) -> None:
    http = start().http
    health = http.get("/health").json()
    assert health["status"] == "ok"
    assert health["model"] == MODEL
    assert health["context_length"] == CONTEXT
    assert health["info"] == {"threads": 2}
    assert (health["in_flight"], health["running"], health["waiting"]) == (0, 0, 0)
    assert http.get("/version").json() == {"version": qwenonnx.__version__}


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/docs", "/openapi.json", "/"])
def test_head_is_answered_as_get_without_a_body(start: Start, path: str) -> None:
    http = start().http
    response = http.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"] == http.get(path).headers["content-type"]


@pytest.mark.parametrize("path", ["/health", "/docs", "/openapi.json", "/"])
def test_what_tells_nothing_needs_no_key(start: Start, path: str) -> None:
    http = start(config=SECURED).http
    assert http.get(path).status_code == http.head(path).status_code == 200
    assert is_error(http.get("/version"), 401)


def test_each_key_has_its_own_limit_of_requests(start: Start) -> None:
    http = start(config=ServeConfig(api_keys=("one", "two"), requests_per_minute=2)).http

    def post(key: str) -> httpx.Response:
        return http.post("/tokenize", json={"prompt": "a"}, headers={"authorization": f"Bearer {key}"})

    assert [post("one").status_code for _ in range(2)] == [200, 200]
    refused = post("one")
    assert is_error(refused, 429)
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert post("two").status_code == 200
    assert is_error(post("three"), 401)
    assert http.get("/v1/models", headers={"authorization": "Bearer one"}).status_code == 200
    assert http.get("/health").status_code == 200


def test_without_keys_the_limit_is_of_an_address(start: Start) -> None:
    http = start(config=ServeConfig(requests_per_minute=1)).http
    assert http.post("/tokenize", json={"prompt": "a"}).status_code == 200
    assert is_error(http.post("/tokenize", json={"prompt": "a"}, headers={"authorization": "Bearer x"}), 429)


def test_time_gives_requests_back() -> None:
    now = 0.0
    passed = 0

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal passed
        passed += 1

    async def receive() -> Message:
        raise AssertionError("reads nothing")

    async def send(_: Message) -> None:
        pass

    limit = RateLimit(inner, per_minute=60, by_key=False, clock=lambda: now)

    def requests(count: int, client: str = "a") -> int:
        nonlocal passed
        passed = 0
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "client": (client, 1)}
        for _ in range(count):
            asyncio.run(limit(scope, receive, send))
        return passed

    assert requests(100) == 60
    assert requests(1) == 0
    now = 2.5
    assert requests(10) == 2
    assert requests(10, "b") == 10
    now = 1e6
    assert requests(100) == 60


def test_keys_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("\ufefffirst\n\n# a comment\n  schlüssel \r\n", encoding="utf-8")
    assert read_keys(path) == ("first", "schlüssel")
    assert read_keys(None) == ()


@pytest.mark.parametrize("content", [None, b"", b"\n# only a comment\n", b"\xff\xfe"])
def test_a_file_without_keys_is_a_usage_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match="keys"):
        read_keys(path)


@pytest.mark.parametrize(
    "options",
    [
        {"port": 70000},
        {"grace": -1},
        {"host": ""},
        {"api_keys": ("",)},
        {"temperature": float("nan")},
        {"requests_per_minute": 0},
        {"last_turns": 0},
        {"max_messages": 0},
        {"max_tokens_default": 0},
    ],
)
def test_impossible_options_are_usage_errors(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        ServeConfig(**options)  # type: ignore[arg-type]
