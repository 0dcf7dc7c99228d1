"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qwenonnx.engine.request import Delta
from qwenonnx.errors import QwenonnxError
from qwenonnx.server.answers import Answer
from qwenonnx.server.errors import ClientDisconnectedError, error_object
from qwenonnx.server.generation import Generation

logger = logging.getLogger("qwenonnx.server")

KEEPALIVE = b": keepalive\n\n"
DONE = b"data: [DONE]\n\n"

# JSON leaves these as they are, but clients that split decoded text into lines take them for line ends.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def frame(payload: dict[str, Any]) -> bytes:
    """One event."""
    text = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_ENDS)}\n\n".encode()


class EventStream(Response):
    """A generation as a `text/event-stream`: data frames, comments during silence, and `[DONE]` in the end.

    A failure after the first byte, when the status is out already, becomes a frame `{"error": ...}` before
    `[DONE]`. When the client disconnects, generation stops.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer, *, include_usage: bool, keepalive: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._answer = answer
        self._include_usage = include_usage
        self._keepalive = keepalive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer, as ASGI wants it."""
        watcher = asyncio.create_task(self._generation.abort_on_disconnect(receive))
        try:
            with self._generation:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for data in self._frames():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()

    async def _frames(self) -> AsyncIterator[bytes]:
        opening = self._answer.opening()
        # Clients and proxies see at once that the request is being worked on.
        yield KEEPALIVE if opening is None else self._chunk(opening)
        try:
            async for data in self._events():
                yield data
        except ClientDisconnectedError:
            return
        except QwenonnxError as error:
            yield frame(error_object(error))
        except Exception as error:
            logger.exception("%s failed", self._answer.id)
            yield frame(error_object(error))
        yield DONE

    async def _events(self) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        last = clock()
        while True:
            event = await self._generation.next(max(last + self._keepalive - clock(), 0.0))
            if event is None:
                yield KEEPALIVE
                last = clock()
            elif isinstance(event, Delta):
                if event.text:
                    yield self._chunk(self._answer.piece(event.text))
                    last = clock()
            else:
                yield self._chunk(self._answer.closing(event.reason))
                if self._include_usage:
                    yield frame(self._answer.usage(event.usage))
                return

    def _chunk(self, payload: dict[str, Any]) -> bytes:
        return frame({**payload, "usage": None} if self._include_usage else payload)
