"""The engine's work on one HTTP request, as the event loop sees it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from starlette.types import Receive

from qwenonnx.engine.request import Delta, Event, Failed, Finished, GenerationRequest, PromptLogprobs
from qwenonnx.errors import QueueFullError, QwenonnxError, UnavailableError
from qwenonnx.server.errors import ClientDisconnectedError

if TYPE_CHECKING:
    from qwenonnx.engine.engine import Engine
    from qwenonnx.engine.ticket import Ticket

logger = logging.getLogger("qwenonnx.server")

# One request may have many choices; more of them at once would keep others waiting.
PARALLEL = 8
_SECONDS_UNTIL_NEXT_TRY = 0.05

ChoiceEvent = tuple[int, PromptLogprobs | Delta | Finished]


class Generation:
    """Bridges the engine's thread and the event loop; belongs to one HTTP request and one consumer.

    Each choice is a request of its own to the engine. At most `PARALLEL` of them are there at a time, and the first
    is there when the constructor returns. The events of one choice come in order; those of several interleave.

    A context manager: leaving it stops the engine's work on the request in any case, and logs one line.

    Raises:
        QwenonnxError: on construction, whatever `Engine.submit` refuses the first request with.
    """

    def __init__(
        self, engine: Engine, requests: Sequence[GenerationRequest], on_close: Callable[[Generation], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._engine = engine
        self._requests = requests
        self._on_close = on_close
        self._tickets: dict[int, Ticket] = {}
        self._submitted = 0
        self._closed = False
        self._tokens = 0
        self._finished: list[Finished] = []
        self._error: QwenonnxError | None = None
        self._submit(0)
        self._submit_more()

    async def next(self, timeout: float | None = None) -> ChoiceEvent | None:
        """The next event and the choice that it belongs to; None after `timeout` seconds of silence.

        Raises:
            QwenonnxError: generation of a choice failed, or was aborted with this error.
        """
        try:
            async with asyncio.timeout(timeout):
                index, event = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(event, Finished) and event.reason == "cancelled":
            event = Failed(UnavailableError("The server is shutting down, so the answer was cut short."))
        if isinstance(event, Failed):
            self._error = event.error
            raise event.error
        if isinstance(event, Delta):
            self._tokens += len(event.token_ids)
        elif isinstance(event, Finished):
            self._finished.append(event)
            self._tickets.pop(index, None)
            self._submit_more()
        return index, event

    def abort(self, error: QwenonnxError) -> None:
        """Stops the engine's work and makes `next` raise `error` once earlier events are consumed."""
        self._cancel_all()
        self._events.put_nowait((0, Failed(error)))

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
        self._cancel_all()
        self._on_close(self)
        self._log(error or self._error)

    def _submit(self, index: int) -> None:
        def sink(event: Event) -> None:
            # The loop may be closed when the engine ends its last requests.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        self._tickets[index] = self._engine.submit(self._requests[index], sink)
        self._submitted = index + 1

    def _submit_more(self) -> None:
        """Hands over the following choices, as many as may be there at a time and as the queue has room for."""
        while not self._closed and self._submitted < len(self._requests) and len(self._tickets) < PARALLEL:
            index = self._submitted
            try:
                self._submit(index)
            except QueueFullError:
                if not self._tickets:  # none of its own will end and make room
                    self._loop.call_later(_SECONDS_UNTIL_NEXT_TRY, self._submit_more)
                return
            except QwenonnxError as error:
                self._events.put_nowait((index, Failed(error)))
                return

    def _cancel_all(self) -> None:
        self._closed = True
        for ticket in self._tickets.values():
            ticket.cancel()

    def _log(self, error: BaseException | None) -> None:
        name = self._requests[0].request_id
        prompt = sum(len(request.prompt_ids) for request in self._requests)
        if isinstance(error, ClientDisconnectedError | asyncio.CancelledError):
            logger.info("%s prompt=%d completion=%d cancelled", name, prompt, self._tokens)
        elif error is not None:
            what = error if isinstance(error, QwenonnxError) else type(error).__name__
            logger.error("%s prompt=%d completion=%d failed: %s", name, prompt, self._tokens, what)
        elif self._finished:
            self._log_finished(name)

    def _log_finished(self, name: str) -> None:
        """One line; of several choices, sums of tokens, the first's time to the first token, and the mean speed."""
        finished, first = self._finished, self._finished[0]
        decode = sum(event.timings.decode for event in finished)
        after_first = sum(max(event.usage.completion_tokens - 1, 0) for event in finished)
        logger.info(
            "%s prompt=%d cached=%d completion=%d ttft=%.3fs rate=%.1ftok/s finish=%s%s",
            name,
            sum(event.usage.prompt_tokens for event in finished),
            sum(event.usage.cached_tokens for event in finished),
            sum(event.usage.completion_tokens for event in finished),
            first.timings.queue + first.timings.prefill,
            after_first / decode if decode > 0 else 0.0,
            ",".join(sorted({event.reason for event in finished})),
            f" choices={len(finished)}" if len(finished) > 1 else "",
        )
