"""One request inside the engine, as the event loop sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from starlette.types import Receive

from qwenonnx.engine.request import Delta, Event, Failed, Finished, GenerationRequest
from qwenonnx.errors import QwenonnxError, UnavailableError
from qwenonnx.server.errors import ClientDisconnectedError

if TYPE_CHECKING:
    from qwenonnx.engine.engine import Engine

logger = logging.getLogger("qwenonnx.server")


class Generation:
    """Bridges the engine's thread and the event loop; belongs to one request and one consumer.

    A context manager: leaving it stops the engine's work on the request in any case, and logs one line.

    Raises:
        QwenonnxError: on construction, whatever `Engine.submit` refuses the request with.
    """

    def __init__(self, engine: Engine, request: GenerationRequest, on_close: Callable[[Generation], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._request = request
        self._on_close = on_close
        self._tokens = 0
        self._finished: Finished | None = None
        self._error: QwenonnxError | None = None
        self._ticket = engine.submit(request, self._sink)

    async def next(self, timeout: float | None = None) -> Delta | Finished | None:
        """The next event; None after `timeout` seconds of silence.

        Raises:
            QwenonnxError: generation failed, or was aborted with this error.
        """
        try:
            async with asyncio.timeout(timeout):
                event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, Finished) and event.reason == "cancelled":
            event = Failed(UnavailableError("The server is shutting down, so the answer was cut short."))
        if isinstance(event, Failed):
            self._error = event.error
            raise event.error
        if isinstance(event, Delta):
            self._tokens += len(event.token_ids)
        else:
            self._finished = event
        return event

    def abort(self, error: QwenonnxError) -> None:
        """Stops the engine's work and makes `next` raise `error` once earlier events are consumed."""
        self._ticket.cancel()
        self._events.put_nowait(Failed(error))

    async def abort_on_disconnect(self, receive: Receive) -> None:
        """Waits until the client goes away, then aborts. The request's body must have been read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.abort(ClientDisconnectedError("The client disconnected."))

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ticket.cancel()
        self._on_close(self)
        self._log(error or self._error)

    def _sink(self, event: Event) -> None:
        # The loop may be closed when the engine ends its last requests.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _log(self, error: BaseException | None) -> None:
        name, prompt = self._request.request_id, len(self._request.prompt_ids)
        done = self._finished
        if isinstance(error, ClientDisconnectedError | asyncio.CancelledError):
            logger.info("%s prompt=%d completion=%d cancelled", name, prompt, self._tokens)
        elif error is not None:
            what = error if isinstance(error, QwenonnxError) else type(error).__name__
            logger.error("%s prompt=%d completion=%d failed: %s", name, prompt, self._tokens, what)
        elif done is not None:
            usage, timings = done.usage, done.timings
            rate = (usage.completion_tokens - 1) / timings.decode if timings.decode > 0 else 0.0
            logger.info(
                "%s prompt=%d cached=%d completion=%d ttft=%.3fs rate=%.1ftok/s finish=%s",
                *(name, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
                *(timings.queue + timings.prefill, max(rate, 0.0), done.reason),
            )
