"""Disconnects, silence, and staying responsive."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import pytest
from http_checks import MODEL, wait_until

from qwenonnx.server.config import ServeConfig

if TYPE_CHECKING:
    from serving_app import Running, Start

pytest_plugins = ["serving_app"]


BODY = b'{"stream":%s,"messages":[{"role":"user","content":"Hi"}]}'


def connect(running: Running, *, stream: bool, extra: Mapping[str, Any] | None = None) -> socket.socket:
    """Sends a chat request and leaves the answer unread."""
    url = urlsplit(running.url)
    connection = socket.create_connection((url.hostname, url.port), timeout=20)
    body = json.dumps({"stream": stream, "messages": [{"role": "user", "content": "Hi"}], **(extra or {})}).encode()
    head = f"POST {url.path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_ends_generation(start: Start, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "qwenonnx.server")
    running = start("word ", end=False, context_length=100_000, delay=0.002)
    with connect(running, stream=stream):
        wait_until(lambda: len(running.runner.decode_calls) > 3)
        assert running.service.in_flight == 1
    engine = running.service.served.engine
    wait_until(lambda: running.service.in_flight == 0 and engine.num_running == 0)
    assert "cancelled" in caplog.text
    assert len(running.runner.decode_calls) < 50_000
    assert running.chat(max_tokens=2).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_during_the_prefill_interrupts_it(start: Start, stream: bool) -> None:
    running = start()
    running.runner.hold()
    with connect(running, stream=stream):
        assert running.runner.entered.wait(20)
    wait_until(lambda: running.service.in_flight == 0 and running.service.served.engine.num_running == 0)
    running.runner.release()
    assert running.chat().status_code == 200


def test_a_disconnect_while_waiting_leaves_the_running_request_alone(start: Start) -> None:
    running = start("Hello")
    running.runner.hold()
    with connect(running, stream=True) as first:
        assert running.runner.entered.wait(20)
        engine = running.service.served.engine
        with connect(running, stream=False):
            wait_until(lambda: engine.num_waiting == 1)
        wait_until(lambda: running.service.in_flight == 1)
        running.runner.release()
        received = b""
        while b"[DONE]" not in received:
            received += first.recv(65536)
    assert "".join(re.findall(r'"content":"(\w+)"', received.decode())) == "Hello"
    wait_until(lambda: engine.num_running == engine.num_waiting == 0)


def test_silence_is_filled_with_comments(start: Start) -> None:
    running = start("Hello", config=ServeConfig(keepalive=0.02))
    running.runner.hold()
    with running.http.stream("POST", "/v1/chat/completions", content=BODY % b"true") as response:
        assert response.status_code == 200
        received = ""
        for text in response.iter_text():
            received += text
            if received.count(": keepalive\n\n") >= 3:
                running.runner.release()
    assert received.startswith('data: {"id"')
    assert all(event.startswith(("data: ", ": keepalive")) for event in received.split("\n\n") if event)
    assert received.endswith("data: [DONE]\n\n")


def test_clients_skip_the_comments(start: Start) -> None:
    running = start("Hello", config=ServeConfig(keepalive=0.001), delay=0.01)
    stream = running.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello"


def test_answers_in_one_piece_carry_no_comments(start: Start) -> None:
    assert "keepalive" not in start("Hello", config=ServeConfig(keepalive=0.001), delay=0.01).chat().text


def test_health_answers_while_the_model_is_at_work(start: Start) -> None:
    running = start()
    running.runner.hold()
    with connect(running, stream=False), connect(running, stream=True):
        assert running.runner.entered.wait(20)
        wait_until(lambda: running.service.in_flight == 2)
        for _ in range(20):
            health = running.http.get("/health")
            assert health.status_code == 200
        assert health.json()["in_flight"] == 2
        assert (health.json()["running"], health.json()["waiting"]) == (1, 1)


def test_one_line_is_logged_per_request_without_its_text(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "qwenonnx")
    running = start("An answer")
    answer: httpx.Response = running.chat("A secret question")
    (line,) = [record.getMessage() for record in caplog.records if "finish=" in record.getMessage()]
    usage = answer.json()["usage"]
    assert answer.json()["id"] in line
    assert f"prompt={usage['prompt_tokens']}" in line
    assert f"completion={usage['completion_tokens']}" in line
    assert "finish=stop" in line
    assert "secret" not in caplog.text
    assert "An answer" not in caplog.text
