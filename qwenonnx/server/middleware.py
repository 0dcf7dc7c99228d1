"""What happens around every request: an id, a key, and an answer even when the server is at fault."""

from __future__ import annotations

import logging
import re
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwenonnx.server.errors import error_response

logger = logging.getLogger("qwenonnx.server")

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class OriginForm:
    """Takes requests whose target is a whole address (`GET http://host/path`), as clients of a proxy send them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] == "http" and scope["path"].startswith(("http://", "https://")):
            path = "/" + scope["path"].split("/", 3)[3] if scope["path"].count("/") > 2 else "/"
            scope = {**scope, "path": path, "raw_path": quote(path).encode()}
        await self._app(scope, receive, send)


class RequestId:
    """Puts `x-request-id` on every answer: the client's own where it is sane, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class HeadRequests:
    """Answers HEAD as GET; the HTTP layer leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class Guard:
    """Turns unforeseen exceptions into an error object, and their traceback into a log entry."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one connection."""
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except Exception as error:
            if scope["type"] != "http" or started:
                raise
            logger.exception("%s failed", scope.get("state", {}).get("request_id"))
            await error_response(error)(scope, receive, send)
