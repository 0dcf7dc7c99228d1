"""The server as a process: loading, signals, exit codes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from http_checks import wait_until

from qwenonnx.errors import QwenonnxError, UsageError
from qwenonnx.server.config import ServeConfig
from qwenonnx.server.run import listen, serve
from qwenonnx.server.served import Served

TESTS = Path(__file__).parents[1]
BODY = {"stream": True, "messages": [{"role": "user", "content": "Hi"}]}


class Process:
    """A running server, and what it has said on stderr so far."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.log = ""
        self.read_log_until("Listening")
        found = re.search(r"http://\S+:\d+", self.log)
        assert found is not None
        self.url = found[0]
        self.http = httpx.Client(base_url=self.url, timeout=30, verify=False)

    def read_log_until(self, text: str) -> None:
        """Reads stderr up to the line that holds the text."""
        assert self.popen.stderr is not None
        while text not in self.log:
            line = self.popen.stderr.readline()
            assert line, self.log
            self.log += line

    def wait_for_status(self, status: str, code: int) -> None:
        def reached() -> bool:
            response = self.http.get("/health")
            return response.json()["status"] == status and response.status_code == code

        wait_until(reached)

    def finish(self) -> int:
        """Waits for the end; returns the exit code."""
        _, rest = self.popen.communicate(timeout=30)
        self.log += rest
        return self.popen.returncode


@contextmanager
def serving(checkpoint: Path, mode: str, *, grace: float = 0.3) -> Iterator[Process]:
    command = [sys.executable, str(TESTS / "server" / "serve_scripted.py"), str(checkpoint), mode, str(grace)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as popen:
        process = Process(popen)
        try:
            with process.http:
                yield process
        finally:
            popen.kill()


def test_a_stream_that_outlives_the_grace_period_ends_with_an_error(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, "endless") as process:
        process.wait_for_status("ok", 200)
        with process.http.stream("POST", "/v1/chat/completions", json=BODY) as response:
            texts = response.iter_text()
            received = next(texts)
            process.popen.send_signal(signal.SIGTERM)
            received += "".join(texts)
        *_, error, done = received.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        assert error.startswith('data: {"error":{"message":"The server is shutting down')
        assert process.finish() == 0
        assert "Traceback" not in process.log


def test_a_stream_that_ends_in_time_is_whole_and_nobody_else_is_let_in(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, "short", grace=30) as process:
        process.wait_for_status("ok", 200)
        with process.http.stream("POST", "/v1/chat/completions", json=BODY) as response:
            texts = response.iter_text()
            received = next(texts)
            process.popen.send_signal(signal.SIGINT)
            host, port = process.url.removeprefix("http://").split(":")

            def refused() -> bool:
                try:
                    socket.create_connection((host, int(port)), timeout=5).close()
                except OSError:
                    return True
                return False

            wait_until(refused)
            received += "".join(texts)
        assert '"finish_reason":"stop"' in received
        assert '"error"' not in received
        assert process.finish() == 0


def test_a_request_that_still_waits_is_told_as_well(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, "endless") as process:
        process.wait_for_status("ok", 200)
        answers: list[httpx.Response] = []
        with process.http.stream("POST", "/v1/chat/completions", json=BODY) as response:
            texts = response.iter_text()
            received = next(texts)

            def wait_in_line() -> None:
                answers.append(process.http.post("/v1/chat/completions", json={**BODY, "stream": False}))

            waiting = threading.Thread(target=wait_in_line)
            waiting.start()
            wait_until(lambda: process.http.get("/health").json()["in_flight"] == 2)
            process.popen.send_signal(signal.SIGTERM)
            received += "".join(texts)
            waiting.join()
        assert '"error"' in received
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["type"] == "server_error"
        assert process.finish() == 0


def test_a_line_says_that_the_model_is_ready_and_where(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, "short") as process:
        process.read_log_until(f"Ready: serving tiny at {process.url}/v1 (context 1,000,000 tokens)")
        assert process.http.get("/health").status_code == 200
        process.popen.send_signal(signal.SIGTERM)
        assert process.finish() == 0


def test_a_second_signal_ends_the_process_at_once(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, "endless", grace=3000) as process:
        process.wait_for_status("ok", 200)
        with process.http.stream("POST", "/v1/chat/completions", json=BODY) as response:
            texts = response.iter_text()
            next(texts)
            process.popen.send_signal(signal.SIGTERM)
            process.read_log_until("Shutting down")
            process.popen.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                "".join(texts)
        assert process.finish() == 0


def test_loading_is_visible_and_can_be_interrupted(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, "never") as process:
        health = process.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "loading"})
        for response in (process.http.post("/v1/chat/completions", json=BODY), process.http.get("/v1/models")):
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "server_error"
            assert response.headers["retry-after"] == "1"
        process.popen.send_signal(signal.SIGTERM)
        assert process.finish() == 0


def test_a_model_that_cannot_be_loaded_ends_the_process_with_one_message(tiny_checkpoint: Path) -> None:
    with serving(tiny_checkpoint, "broken") as process:
        assert process.finish() == 1
        assert process.log.count("models/x has no model.onnx; export it again.") == 1
        assert "Traceback" not in process.log


def never() -> Served:
    raise AssertionError("must not be loaded")


def test_a_port_in_use_is_one_clear_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(QwenonnxError, match=rf"^Port {port} on 127\.0\.0\.1 is in use .*another port\.$"):
            serve(never, ServeConfig(port=port))


def test_answers_are_not_held_back_by_the_network_stack() -> None:
    # asyncio sets TCP_NODELAY on connections only when it knows that they are TCP.
    with listen("127.0.0.1", 0, 100) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_a_host_without_an_address_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"no\.such\.host\.invalid"):
        serve(never, ServeConfig(host="no.such.host.invalid", port=0))
