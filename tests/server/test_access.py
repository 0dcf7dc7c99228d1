"""Keys, CORS, request ids and the small endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from http_checks import CONTEXT, MODEL, is_error

import qwenonnx
from qwenonnx.errors import UsageError
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


def test_the_openapi_document_describes_the_bodies(start: Start) -> None:
    document = start().http.get("/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert {"messages", "temperature", "stop", "stream"} <= set(body["schema"]["properties"])


@pytest.mark.parametrize(
    "options", [{"port": 70000}, {"grace": -1}, {"host": ""}, {"api_keys": ("",)}, {"temperature": float("nan")}]
)
def test_impossible_options_are_usage_errors(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        ServeConfig(**options)  # type: ignore[arg-type]
