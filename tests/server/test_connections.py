"""Connections that nobody uses, more of them than the system allows, and odd heads of requests."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import pytest
import uvicorn
from http_checks import wait_until
from starlette.types import Receive, Scope, Send

from qwenonnx.server.connections import Listener, connection_class, connection_limit
from qwenonnx.server.middleware import OriginForm
from qwenonnx.server.run import listen

REQUEST = b"GET /path HTTP/1.1\r\nHost: x\r\n\r\n"


class Echo:
    """Answers with the path; `/slow` only once `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.slow = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            self.slow += 1
            await self.go.wait()
        body = f"[{scope['path']}?{scope['query_string'].decode()}]".encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Running:
    """A server in a thread."""

    def __init__(self, listener: Listener, echo: Echo, loop: asyncio.AbstractEventLoop) -> None:
        self.listener = listener
        self.echo = echo
        self.loop = loop
        self.address = listener.getsockname()

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=20)
        connection.sendall(data)
        return connection

    def get(self, target: str = "/path") -> str:
        with httpx.Client(base_url="http://{}:{}".format(*self.address), timeout=20, verify=False) as http:
            return http.get(target).text


@contextmanager
def running(limit: int = 8, timeout: float = 300) -> Iterator[Running]:
    with listen("127.0.0.1", 0, 1000) as listener:
        listener.limit = limit
        echo = Echo()
        config = uvicorn.Config(
            OriginForm(echo),
            http=connection_class(listener, timeout),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        loop = asyncio.new_event_loop()

        def work() -> None:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(server.serve(sockets=[listener]))

        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield Running(listener, echo, loop)
        finally:
            loop.call_soon_threadsafe(echo.go.set)
            server.should_exit = True
            thread.join()


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1000) == b""
    except ConnectionResetError:
        return True


def read(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"]"):
        data += connection.recv(1000)
    return data


@pytest.mark.parametrize("data", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_without_a_whole_head_is_closed(data: bytes) -> None:
    with running(timeout=0.05) as server, server.connect(data) as connection:
        assert is_closed(connection)
        wait_until(lambda: server.listener.num_open == 0)


def test_a_head_in_pieces_does_not_put_the_end_off() -> None:
    with running(timeout=0.2) as server, server.connect() as connection:
        closed = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                while not closed.wait(0.02):
                    connection.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        assert is_closed(connection)
        closed.set()
        thread.join()


def test_a_connection_between_two_requests_stays_open_longer() -> None:
    with running(timeout=0.1) as server, server.connect(REQUEST) as connection:
        read(connection)
        connection.settimeout(0.4)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(20)
        connection.sendall(REQUEST)
        assert b"[/path?]" in read(connection)
        connection.sendall(b"G")
        assert is_closed(connection)


def test_a_request_at_work_outlives_the_limit_for_heads() -> None:
    with running(timeout=0.05) as server, server.connect(REQUEST.replace(b"path", b"slow")) as connection:
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(20)
        server.loop.call_soon_threadsafe(server.echo.go.set)
        assert b"[/slow?]" in read(connection)


def test_at_the_limit_the_longest_idle_connection_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with running(limit=8) as server, ExitStack() as stack:
        working = stack.enter_context(server.connect(REQUEST.replace(b"path", b"slow")))
        wait_until(lambda: server.echo.slow == 1)
        idle = [stack.enter_context(server.connect(b"G")) for _ in range(40)]
        for _ in range(5):
            assert server.get() == "[/path?]"
        assert server.listener.num_open <= 8
        assert all(is_closed(connection) for connection in idle[:30])
        server.loop.call_soon_threadsafe(server.echo.go.set)
        assert b"[/slow?]" in read(working)
    lines = [record.getMessage() for record in caplog.records if record.name != "httpx"]
    assert len([line for line in lines if "8 connections are open, which is the limit" in line]) == 1
    assert not [record for record in caplog.records if record.exc_info]


def test_where_all_are_at_work_the_new_connection_is_closed() -> None:
    with running(limit=3) as server, ExitStack() as stack:
        working = [stack.enter_context(server.connect(REQUEST.replace(b"path", b"slow"))) for _ in range(3)]
        wait_until(lambda: server.echo.slow == 3)
        with server.connect() as connection:
            assert is_closed(connection)
        server.loop.call_soon_threadsafe(server.echo.go.set)
        assert all(b"[/slow?]" in read(connection) for connection in working)
        assert server.get() == "[/path?]"


def test_running_out_of_descriptors_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter(range(3))
    accept = socket.socket.accept

    def scarce(self: socket.socket) -> Any:
        if isinstance(self, Listener) and self._spare is not None and next(failures, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    with running() as server:
        for _ in range(3):
            with server.connect() as connection:
                assert is_closed(connection)
        assert server.get() == "[/path?]"


def test_the_limit_leaves_descriptors_for_the_rest_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    limits = (64, 64)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: raised.append(new))
    monkeypatch.setattr("qwenonnx.server.connections._open_descriptors", lambda: 10)

    assert connection_limit(1024) == 22
    assert raised == []

    limits = (256, 4096)
    assert connection_limit(1024) == 1024
    assert connection_limit(100_000) == 4054
    assert raised == [(4096, 4096), (4096, 4096)]

    limits = (16, 16)
    assert connection_limit(1024) == 8


@pytest.mark.parametrize(
    ("target", "echoed"),
    [
        (b"http://127.0.0.1/health", b"[/health?]"),
        (b"https://host:81/a/b?c=http://d/e", b"[/a/b?c=http://d/e]"),
        (b"http://127.0.0.1", b"[/?]"),
        (b"/http://host/x", b"[/http://host/x?]"),
    ],
)
def test_a_target_that_is_a_whole_address_is_taken(target: bytes, echoed: bytes) -> None:
    with running() as server, server.connect(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n") as connection:
        assert read(connection).endswith(echoed)


def test_a_request_for_another_protocol_is_answered_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    head = REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    with running() as server, server.connect(head) as connection:
        assert b"[/path?]" in read(connection)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nBad header\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_object(data: bytes) -> None:
    with running() as server, server.connect(data) as connection:
        received = b""
        while more := connection.recv(65536):
            received += more
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"content-type: application/json" in head
        assert b"x-request-id: req_" in head
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert server.get() == "[/path?]"
