"""A hub on loopback with as much of the protocol as huggingface_hub needs to list and download one repository."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Serves `files` as the repository `repo_id`; the other fields are faults to be switched on by a test."""

    repo_id: str
    files: dict[str, bytes]
    error_code: str | None = None
    status: int = 404
    cut_after: int | None = None
    """Bytes of each weight file after which the connection is closed."""
    swapped: dict[str, bytes] = field(default_factory=dict)
    """Contents that are delivered instead of the announced ones."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range of every request."""

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            state = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def downloads(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]

    def listing(self) -> dict[str, object]:
        siblings = []
        for name, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            sibling: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": blob}
            if name.endswith((".safetensors", ".gguf")):
                sha256 = hashlib.sha256(content).hexdigest()
                sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 130}
            siblings.append(sibling)
        return {"id": self.repo_id, "sha": SHA, "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.state
        path = self.path.partition("?")[0]
        hub.requests.append((self.command, path, self.headers.get("Range")))
        if path == "/":
            self._send(200, b"hub")
        elif hub.error_code is not None:
            self._send(hub.status, b"{}", {"X-Error-Code": hub.error_code, "X-Error-Message": "no"})
        elif path == f"/api/models/{hub.repo_id}/revision/main":
            self._send(200, json.dumps(hub.listing()).encode())
        elif path.startswith(f"/{hub.repo_id}/resolve/{SHA}/") and (name := path.rpartition("/")[2]) in hub.files:
            self._send_file(name)
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send_file(self, name: str) -> None:
        hub = self.state
        content = hub.swapped.get(name, hub.files[name])
        etag = hashlib.sha256(hub.files[name]).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted is None:
            self._send(200, content, headers, cut=hub.cut_after if name.endswith(".safetensors") else None)
            return
        start = int(wanted.removeprefix("bytes=").partition("-")[0])
        headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206, content[start:], headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
            self.wfile.flush()
