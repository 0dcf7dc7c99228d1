"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from qwenonnx.engine.request import Finished
from qwenonnx.errors import QwenonnxError
from qwenonnx.server.errors import ClientDisconnectedError, error_object
from qwenonnx.server.generation import Generation
from qwenonnx.server.prepared import Prepared

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

    def __init__(self, generation: Generation, prepared: Prepared, *, keepalive: float) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._prepared = prepared
        self._answer = prepared.answer
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
        openings = [self._answer.opening(index) for index in range(len(self._prepared.requests))]
        # Clients and proxies see at once that the request is being worked on.
        yield b"".join(self._chunk(opening) for opening in openings if opening is not None) or KEEPALIVE
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
        choices, totals = self._prepared.choices(), self._prepared.totals()
        left = len(choices)
        clock = asyncio.get_running_loop().time
        last = clock()
        while left:
            answered = await self._generation.next(max(last + self._keepalive - clock(), 0.0))
            if answered is None:
                yield KEEPALIVE
                last = clock()
                continue
            index, event = answered
            if (piece := choices[index].feed(event)) is not None:
                yield self._chunk(self._answer.piece(index, piece))
                last = clock()
            if isinstance(event, Finished):
                left -= 1
                totals.add(index, event)
                closing = self._answer.closing(index, event.reason)
                wants_timings = self._prepared.timings and not left and not self._prepared.include_usage
                yield self._chunk({**closing, "timings": totals.timings_object()} if wants_timings else closing)
        if self._prepared.include_usage:
            usage = self._answer.usage(totals.usage)
            yield frame({**usage, "timings": totals.timings_object()} if self._prepared.timings else usage)

    def _chunk(self, payload: dict[str, Any]) -> bytes:
        return frame({**payload, "usage": None} if self._prepared.include_usage else payload)
