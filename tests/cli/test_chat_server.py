"""`qwenonnx chat URL`, against a server that says what the test wrote down."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from qwenonnx.cli.main import app


class Stub(ThreadingHTTPServer):
    """Answers every POST with one status and body, and keeps what was sent."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status = status
        self.body = body
        self.requests: list[tuple[str, dict[str, str], Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def stub(body: str, status: int = 200) -> Iterator[Stub]:
    with Stub(status, body.encode()) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def frames(*chunks: Any) -> str:
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def chat(*args: str, text: str = "Hi", env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["chat", *args], input=text, env=env)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_pieces_are_printed_as_one_answer(path: str) -> None:
    body = ": keepalive\n\n" + frames(
        delta(role="assistant", content=""),
        delta(content="Grüß "),
        delta(content="dich 模型"),
        delta(),
        {"choices": []},
    )
    with stub(body) as server:
        result = chat(server.url + path, "--max-tokens", "5", "--system", "Be brief.", text="Hallo é\n")

    assert (result.exit_code, result.stdout, result.stderr) == (0, "Grüß dich 模型\n", "")
    ((asked, headers, sent),) = server.requests
    assert asked == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hallo é"}]
    assert sent["max_tokens"] == 5
    assert sent["stream"] is True


def test_an_answer_cut_by_the_limit_is_said() -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    with stub(frames(delta(content="Hal"), end, {"choices": []})) as server:
        result = chat(server.url, "--max-tokens", "1")

    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hal\n", "[stopped at --max-tokens 1]\n")


def test_the_key_is_sent() -> None:
    with stub(frames(delta(content="ok"))) as server:
        chat(server.url, "--api-key", "one")
        chat(server.url, env={"QWENONNX_API_KEY": "two"})

    assert [headers["Authorization"] for _, headers, _ in server.requests] == ["Bearer one", "Bearer two"]


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (
            401,
            '{"error": {"message": "Wrong key."}}',
            "the server refused (Wrong key.); give its key with --api-key or QWENONNX_API_KEY",
        ),
        (502, "<html>Bad Gateway</html>", "the server refused (HTTP 502)"),
        (500, '{"detail": "x"}', "the server refused (HTTP 500)"),
        (500, '["x"]', "the server refused (HTTP 500)"),
        (200, frames(delta(content="Hal"), {"error": {"message": "Out of luck."}}), "the server failed: Out of luck."),
        (200, "data: {not json\n\n", "the answer cannot be read"),
        (200, "<html>Welcome</html>", "no server with the OpenAI API"),
        (200, frames(delta(content="Hal")).replace("data: [DONE]", ""), "the answer broke off"),
    ],
)
def test_a_server_that_fails_is_one_line(status: int, body: str, message: str) -> None:
    with stub(body, status) as server:
        result = chat(server.url)

    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.exception is None or isinstance(result.exception, SystemExit)
